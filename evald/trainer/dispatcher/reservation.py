"""Room in a staging root that a writer has been promised: several writers share one budget.

Under ``.evald/reserved/lock``, all that lies in the root is counted, with all that other writers
have been promised and may not have written yet. A promise is a file there that its writer holds
locked: it ends with the process.
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

import structlog

log = structlog.get_logger(__name__)

#: the look at the root under the lock takes milliseconds.
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.01
#: of an export of the SDK, or of a small file that is about to be renamed.
_HIDDEN = re.compile(r"\.tmp-.+\.[0-9a-f]{8}")


class Reservations:
    """Promises of one process; ``staging_root`` is the root whose budget counts."""

    def __init__(self, staging_root: Path) -> None:
        self._root = staging_root
        self._folder = staging_root / ".evald" / "reserved"
        #: step -> file, and the descriptor that holds it locked.
        self._held: dict[int, tuple[Path, int]] = {}

    def take(self, step: int, need_bytes: int, judge: Callable[[int], str | None]) -> str | None:
        """Reserve ``need_bytes`` unless ``judge`` says why not; returns what it says.

        ``judge`` is given the bytes that are used and promised already. Raises OSError where the
        root cannot be counted in: it is not there, or this user may not write into ``.evald``.
        """
        self.give_back(step)
        self._folder.mkdir(exist_ok=True)
        with _locked(self._folder / "lock"):
            refusal = judge(self.used_bytes())
            if refusal is None:
                self._held[step] = self._promise(need_bytes)
        return refusal

    def give_back(self, step: int) -> None:
        """End the promise for a step, if there is one: it is published, or will not be."""
        path, descriptor = self._held.pop(step, (None, -1))
        if path is None:
            return
        with suppress(OSError):  # it is worth nothing once the lock is gone
            path.unlink()
        with suppress(OSError):  # a process that was forked meanwhile must not hold it any longer
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def used_bytes(self) -> int:
        """Count what lies in the root, and what is promised; raises OSError."""
        # in this order what is renamed meanwhile counts twice rather than not at all
        promised = self._promised_bytes()
        done, under_way = _count(self._root, runs=True)
        trash = _bytes(self._root / ".evald" / "trash")
        # a promise covers what its writer has written of it so far
        return done + trash + max(under_way, promised)

    def _promised_bytes(self) -> int:
        promised = 0
        for path in self._folder.iterdir():
            if path.name == "lock":
                continue
            if not _is_held(path):
                path.unlink(missing_ok=True)  # of a process that was killed
                continue
            with suppress(FileNotFoundError, ValueError):
                promised += int(path.read_bytes())
        return promised

    def _promise(self, need_bytes: int) -> tuple[Path, int]:
        path = self._folder / f"{os.getpid()}.{secrets.token_hex(4)}"
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
