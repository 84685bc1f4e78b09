"""Room in a staging root that a writer has been promised: several writers share one budget.

Under ``.evald/reserved/lock``, all that lies in the root is counted, with all that other writers
have been promised and may not have written yet. A promise is a file there that its writer holds
locked: it ends with the process. Whoever in one process promises for the same snapshot (the
dispatcher before its weights are gathered, the export that writes it) shares one promise.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

#: the look at the root under the lock takes milliseconds.
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.01
#: of an export of the SDK, or of a small file that is about to be renamed; of a push.
_HIDDEN = re.compile(r"\.tmp-.+\.[0-9a-f]{8}|\.push-.+\.[0-9a-f]{16}")
#: of this process: pids are not enough where containers share a root.
_PROCESS = secrets.token_hex(8)


class Reservations:
    """Promises for snapshots in ``root``; ``staging_root`` is the root whose budget counts.

    ``root`` is that, or a run's folder in it; None: that.
    """

    def __init__(self, staging_root: Path, root: Path | None = None) -> None:
        self._root = staging_root
        self._place = (root or staging_root).absolute()
        self._folder = staging_root / ".evald" / "reserved"
        #: name -> files, and the descriptors that hold them locked.
        self._held: dict[int | str, list[tuple[Path, int]]] = {}

    def take(
        self,
        name: int | str,
        need_bytes: int | Callable[[int], int],
        judge: Callable[[int], str | None],
    ) -> str | None:
        """Reserve ``need_bytes`` in all unless ``judge`` says why not; returns what it says.

        ``judge`` is given the bytes that are used and promised to others, and so is ``need_bytes``
        where only that tells how many they are. Raises OSError where the root cannot be counted in:
        it is not there, or this user may not write into ``.evald``.
        """
        with self._counting():
            own, others = self._promised_bytes(name)
            if not isinstance(need_bytes, int):
                need_bytes = need_bytes(self._used_bytes(others))
            if own >= need_bytes > 0:
                return None
            refusal = judge(self._used_bytes(max(own, need_bytes) + others) - need_bytes)
            if refusal is None:
                self._held.setdefault(name, []).append(self._promise(name, need_bytes - own))
        return refusal

    def covers(self, name: int | str) -> bool:
        """Tell whether this process has a promise for a name."""
        return any(self._folder.glob(f"{self._prefix(name)}*"))

    def give_back(self, name: int | str) -> None:
        """End the promise for a name, if there is one: it is published, or will not be."""
        for path, descriptor in self._held.pop(name, ()):
            with suppress(OSError):  # it is worth nothing once the lock is gone
                path.unlink()
            with suppress(OSError):  # a process that was forked meanwhile must not hold it longer
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def used_bytes(self) -> int:
        """Count what lies in the root, and what is promised; raises OSError."""
        with self._counting():
            # in this order what is renamed meanwhile counts twice rather than not at all
            return self._used_bytes(sum(self._promised_bytes(None)))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self._folder.mkdir(exist_ok=True)
        with _locked(self._folder / "lock"):
            yield

    def _used_bytes(self, promised: int) -> int:
        done, under_way = _count(self._root, runs=True)
        trash = _bytes(self._root / ".evald" / "trash")
        # a promise covers what its writer has written of it so far
        return done + trash + max(under_way, promised)

    def _promised_bytes(self, name: int | str | None) -> tuple[int, int]:
        """Add up what is promised: by this process for a name, and else. Under the lock only."""
        own = others = 0
        for path in self._folder.iterdir():
            if path.name == "lock":
                continue
            if not _is_held(path):
                path.unlink(missing_ok=True)  # of a process that was killed
                continue
            with suppress(FileNotFoundError, ValueError):
                promised = int(path.read_bytes())
                if name is not None and path.name.startswith(self._prefix(name)):
                    own += promised
                else:
                    others += promised
        return own, others

    def _prefix(self, name: int | str) -> str:
        what = xxhash.xxh3_64_hexdigest(os.fsencode(f"{self._place}\0{name}"))
        return f"{_PROCESS}.{what}."

    def _promise(self, name: int | str, need_bytes: int) -> tuple[Path, int]:
        path = self._folder / f"{self._prefix(name)}{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, b"%d" % need_bytes)
        return path, descriptor


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of all writers; raises OSError when another holds it for too long."""
    # only to read: it may be another user's, whose job writes into the same root
    flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {path}") from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    """Tell whether a living process holds a file or directory locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _count(folder: Path, *, runs: bool) -> tuple[int, int]:
    """Return the bytes in a folder, and in folders of runs in it: what is done, and under way."""
    done = under_way = 0
    for path in folder.iterdir():
        if path.name == ".evald":
            continue
        if _HIDDEN.fullmatch(path.name) and _is_held(path):
            under_way += _bytes(path)
        elif runs and path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError, PermissionError):
                more = _count(path, runs=False)
                done, under_way = done + more[0], under_way + more[1]
        else:
            done += _bytes(path)
    return done, under_way


def largest_bytes(staging_root: Path) -> int:
    """Return the size of the largest snapshot in the root, or in a run's folder in it; 0: none."""
    largest = 0
    with suppress(OSError):
        for path in staging_root.iterdir():
            if path.name.startswith(".") or not path.is_dir():
                continue
            inner = [one for one in path.iterdir() if not one.name.startswith(".")]
            # a run's folder holds folders only, a snapshot has files
            is_run = all(one.is_dir() for one in inner)
            largest = max(largest, *map(_bytes, inner if is_run else [path]), 0)
    return largest


def _bytes(path: Path) -> int:
    """Add up the files at and below ``path``; links count as nothing, what vanishes neither."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    total = 0
    for folder, _, names in os.walk(path) if stat.S_ISDIR(status.st_mode) else ():
        for name in names:
            with suppress(OSError):
                file = Path(folder, name).lstat()
                total += file.st_size if stat.S_ISREG(file.st_mode) else 0
    return total
