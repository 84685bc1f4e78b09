"""Push onto a file system that both hosts see: a plain copy, read back and hashed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from evald.trainer.contract import NoSpace, PushError
from evald.trainer.publish import NoRoom
from evald.trainer.publish.budget import Claim
from evald.trainer.publish.content import hash_file, open_up
from evald.trainer.publish.locks import lock, unlock
from evald.trainer.push.far import (
    STALE_MINUTES,
    State,
    Where,
    check_room,
    late,
    linked,
    no_root,
    taken,
)
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import Parcel, is_attempt, temporary_prefix

_CHUNK_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CopyFar:
    """A root in this machine's file system, ``streams`` files at a time."""

    def __init__(self, root: Path, *, streams: int) -> None:
        self._root = root
        self._streams = streams
        #: the hidden directory of the push under way, locked.
        self._held: int | None = None
        #: its room in the budget.
        self._claim: Claim | None = None

    def __str__(self) -> str:
        """Show it as it was given."""
        return str(self._root)

    def read(self, names: Sequence[str], deadline: float) -> bytes:
        """Return the first of some small files, named from the root; empty where there is none."""
        del deadline
        with self._work():
            for path in (self._root / name for name in names):
                if path.is_file():
                    return path.read_bytes()
        return b""

    def prepare(self, parcel: Parcel, deadline: float, *, replace: bool) -> State:
        """Make the hidden directory, or tell what is there already; see ``FarEnd``."""
        del deadline
        with self._work():
            if not self._root.is_dir():
                raise no_root(self)
            final, temporary = self._root / parcel.name, self._root / parcel.temporary
            if os.path.lexists(final):
                marker = final / parcel.marker
                if not replace:
                    return "marked" if marker.is_file() else "unmarked"
                with suppress(FileNotFoundError, NotADirectoryError):
                    _remove(marker)
                old = temporary.with_name(temporary.name + ".old")
                _remove(final.rename(old))
            self._sweep(parcel.name, keep=temporary)
            self._hold(temporary)
            self._reserve(parcel)
            there = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
            disk = os.statvfs(self._root)
        free_bytes = disk.f_bavail * disk.f_frsize
        check_room(parcel, self, there_bytes=there, free_bytes=free_bytes)
        return "absent"

    def release(self) -> None:
        """Let go of the hidden directory; what is in it stays."""
        held, self._held = self._held, None
        unlock(held)
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.give_back()

    def _reserve(self, parcel: Parcel) -> None:
        self._claim = Claim(self._root, parcel.temporary, final=parcel.said.final)
        try:
            self._claim.take(parcel.size_bytes)
        except NoRoom as error:
            raise NoSpace(f"cannot push {parcel.name} to {self}: {error}") from error

    def _hold(self, temporary: Path) -> None:
        if temporary.is_symlink():
            raise linked(self, temporary.name)
        temporary.mkdir(exist_ok=True)
        self.release()
        self._held = lock(temporary)
        if self._held is None:
            raise PushError(
                f"cannot push to {self}: another process is pushing the same snapshot there right "
                "now; let one do it"
            )

    def send(
        self, parcel: Parcel, files: Sequence[SourceFile], deadline: float, *, again: bool
    ) -> None:
        """Copy files; those that an interrupted push has finished are not copied once more."""
        stop = threading.Event()
        temporary = self._root / parcel.temporary

        def copy(file: SourceFile) -> None:
            try:
                self._copy(file, temporary / file.name, deadline, stop, again=again)
            except BaseException:
                stop.set()  # the others need not go on
                raise

        largest_first = sorted(files, key=lambda file: -file.size_bytes)
        with self._work(), self._pool() as pool:
            results = [pool.submit(copy, file) for file in largest_first]
            faults = [fault for one in results if (fault := one.exception()) is not None]
            # the cause before those that were only stopped by it
            for fault in sorted(faults, key=lambda fault: isinstance(fault, _Stopped)):
                raise fault

    def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
        """Read the copies back and compare with the manifest's hashes, else with the source's."""
        target = self._root / (parcel.temporary if where == "temporary" else parcel.name)

        def differs(file: SourceFile) -> bool:
            if time.monotonic() > deadline:
                raise late(self)
            copy = target / file.name
            try:
                if copy.stat().st_size != file.size_bytes:
                    return True
            except (FileNotFoundError, NotADirectoryError):
                return True
            entry = parcel.said.files.get(file.name)
            wanted = None if entry is None else entry.xxh3
            wanted = hash_file(file.path) if wanted is None else wanted.lower()
            return hash_file(copy, from_disk=True) != wanted

        with self._work(), self._pool() as pool:
            bad = pool.map(differs, parcel.files)
            return {file.name for file, is_bad in zip(parcel.files, bad, strict=True) if is_bad}

    def publish(self, parcel: Parcel, deadline: float) -> None:
        """Open the hidden directory up, rename it, write the marker."""
        del deadline
        final, temporary = self._root / parcel.name, self._root / parcel.temporary
        marker = f"{parcel.name}/{parcel.marker}"
        with self._work():
            open_up(temporary, self._root)
            final.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(final):
                raise taken(self)
            # room is needed before the directory has its name, and not after it
            with self._hidden(marker, parcel.content) as hidden:
                (temporary / parcel.marker).parent.mkdir(parents=True, exist_ok=True)
                temporary.rename(final)
                hidden.replace(self._root / marker)

    def write(self, name: str, content: bytes, deadline: float) -> None:
        """Write a small file below the root: nobody ever sees half of it."""
        del deadline
        with self._work():
            if not self._root.is_dir():
                raise no_root(self)
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._hidden(name, content) as hidden:
                hidden.replace(path)

    @contextmanager
    def _hidden(self, name: str, content: bytes) -> Iterator[Path]:
        """Write a file under a hidden name, for the block to rename."""
        path = self._root / f"{temporary_prefix(name)}{os.urandom(8).hex()}"
        try:
            path.write_bytes(content)
            path.chmod(0o644)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def discard(self, name: str, deadline: float) -> None:
        """Remove the hidden directories of a name."""
        del deadline
        with self._work():
            for left in self._root.glob(".push-*"):
                if is_attempt(left.name, name):
                    _remove_unheld(left)

    def _sweep(self, name: str, *, keep: Path) -> None:
        """Remove what pushes of other bytes of this name, and pushes long ago, have left."""
        oldest = time.time() - 60 * STALE_MINUTES
        for left in self._root.glob(".push-*"):
            if left == keep:
                continue
            if is_attempt(left.name, name):
                _remove_unheld(left)
            else:
                with suppress(OSError):  # of another user, or gone meanwhile
                    if left.lstat().st_mtime < oldest:
                        _remove_unheld(left)

    def _copy(
        self,
        file: SourceFile,
        target: Path,
        deadline: float,
        stop: threading.Event,
        *,
        again: bool,
    ) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if not again and target.stat().st_size == file.size_bytes:
                return  # the check reads it in any case
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(file.size_bytes, 1))))
        # Not truncated: where nothing can be locked, another push may be writing the same bytes,
        # and must not find less after its check than before.
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with (
            open(descriptor, "wb") as out,  # noqa: PTH123 - a descriptor
            file.path.open("rb", buffering=0) as source,
        ):
            while count := source.readinto(buffer):
                if stop.is_set():
                    raise _Stopped
                if time.monotonic() > deadline:
                    raise late(self)
                out.write(buffer[:count])
            out.truncate()
            out.flush()
            os.fsync(out.fileno())  # else the check would read what never left this machine

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._streams, "evald push")

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Turn an OSError into what a carrier may raise."""
        try:
            yield
        except OSError as error:
            at = "" if error.filename is None else f" ({error.filename})"
            sentence = f"cannot push to {self}: {error.strerror or error}{at}"
            kind = NoSpace if error.errno in _FULL else PushError
            raise kind(sentence) from error


class _Stopped(Exception):
    """The copy of another file has failed."""


def _remove_unheld(path: Path) -> None:
    """Remove what no living push writes into."""
    held = None
    if path.is_dir() and not path.is_symlink():
        held = lock(path)
        if held is None:
            return
    try:
        _remove(path)
    finally:
        unlock(held)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
