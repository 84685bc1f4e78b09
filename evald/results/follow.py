"""The one reader of the ledger: whole lines, each once, wherever the file goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from evald.errors import LedgerError
from evald.results.records import AnyRecord, Newer, decode_any

REPAIR = (
    "repair that line, or move the file away: evald then starts a new ledger "
    "and measures again what is staged"
)


class Cursor(msgspec.Struct, frozen=True):
    """How far a reader got: ``offset`` bytes into one file; all 0 before the first line."""

    device: int = 0
    inode: int = 0
    offset: int = 0


class Follower:
    """Reads the lines that were added since the last call; blocking, for one thread.

    The file need not exist yet. A half-written last line waits until it is whole. A file that was
    moved away is read to its end before the one that took its place. A file that does not go on
    from the last line read (truncated, or another one) is read from its start: readers know
    records again by their ``record_id``.
    """

    def __init__(self, path: Path, cursor: Cursor | None = None) -> None:
        self.path = path
        self.cursor = cursor or Cursor()
        #: how often reading began again at the start of a file.
        self.restarts = 0
        self._descriptor = -1
        #: the newest line read: what a file must hold before ``offset`` to be the same ledger.
        self._last = b"\n" if self.cursor.offset else b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a later read opens it again and goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> list[bytes]:
        """Return the new whole lines, without their newlines; raises OSError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return self._rest()
        identity = (status.st_dev, status.st_ino)
        lines = []
        if self._descriptor >= 0 and identity != (self.cursor.device, self.cursor.inode):
            lines = self._rest()
            self.close()
        if self._descriptor < 0:
            self._open()
        return lines + self._rest()

    def _open(self) -> None:
        try:
            # (a pipe is not waited for: reading at an offset then fails)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:  # between stat and open
            return
        status = os.fstat(self._descriptor)
        same = (status.st_dev, status.st_ino) == (self.cursor.device, self.cursor.inode)
        # A copy of the ledger (rsync writes a new file each time) goes on where the last one was;
        # a cursor from an earlier life knows no line by which to tell a copy.
        offset = self.cursor.offset if same or self._last != b"\n" else 0
        if offset < self.cursor.offset:
            self._restart()
        self.cursor = Cursor(status.st_dev, status.st_ino, offset)

    def _restart(self) -> None:
        self.cursor = Cursor(self.cursor.device, self.cursor.inode)
        self._last = b""
        self.restarts += 1

    def _rest(self) -> list[bytes]:
        """Return the whole lines from the cursor to the end of the open file."""
        if self._descriptor < 0:
            return []
        before = len(self._last)
        if os.pread(self._descriptor, before, self.cursor.offset - before) != self._last:
            self._restart()
        length = os.fstat(self._descriptor).st_size - self.cursor.offset
        lines, _torn = split_lines(os.pread(self._descriptor, max(length, 0), self.cursor.offset))
        if lines:
            offset = self.cursor.offset + sum(len(line) + 1 for line in lines)
            self.cursor = Cursor(self.cursor.device, self.cursor.inode, offset)
            self._last = lines[-1] + b"\n"
        return lines


async def follow(
    path: Path, *, cursor: Cursor | None = None, poll_s: float = 0.2
) -> AsyncGenerator[bytes, None]:
    """Yield each line of ``path`` as it appears, for ever; see :class:`Follower`."""
    with Follower(path, cursor) as follower:
        while True:
            lines = await asyncio.to_thread(follower.read)
            for line in lines:
                yield line
            if not lines:
                await asyncio.sleep(poll_s)


def read_records(path: Path) -> list[AnyRecord]:
    """Return the records that ``path`` holds now, without a torn tail; none if there is no file.

    Types that this version does not know are left out. Raises LedgerError for a broken line.
    """
    with Follower(path) as follower:
        lines = follower.read()
    if lines and not is_json(lines[-1]):
        lines.pop()
    return [record for record in decode_lines(lines, path) if not isinstance(record, Newer)]


def decode_lines(lines: Iterable[bytes], path: Path) -> Iterator[AnyRecord | Newer]:
    """Decode the lines of ``path`` from its first; raises LedgerError naming a broken one."""
    for number, line in enumerate(lines, start=1):
        try:
            yield decode_any(line)
        except msgspec.DecodeError as fault:
            raise LedgerError(
                f"cannot read ledger {path}: line {number}: {fault}; {REPAIR}"
            ) from fault


def split_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Split into whole lines, without their newlines, and what follows the last newline."""
    *lines, torn = content.split(b"\n")
    return lines, torn


def is_json(line: bytes) -> bool:
    """Tell whether ``line`` is JSON at all: a torn line is not."""
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):  # (evald writes nothing that deep)
        return False
    return True
