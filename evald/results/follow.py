"""The one reader of the ledger: whole lines, each once, wherever its files go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from evald.errors import LedgerError
from evald.results.records import AnyRecord, Newer, decode_any
from evald.results.segments import Segment, closed_segments

REPAIR = (
    "repair that line, or move the file away, with the closed ones before it "
    "(results.FIRST-LAST.jsonl): evald then measures again what is staged"
)
#: what one batch of lines takes, if none of them is longer.
_BATCH_BYTES = 4 << 20


class Cursor(msgspec.Struct, frozen=True):
    """How far a reader got: ``offset`` bytes into one file; all 0 before the first line."""

    device: int = 0
    inode: int = 0
    offset: int = 0


class Follower:
    """Reads the lines that were added since the last call; blocking, for one thread.

    The ledger need not exist yet. A half-written last line waits until it is whole. Closed files
    of a ledger that was rotated come first, oldest first; whatever else is moved away is read to
    its end before what took its place. A ledger that does not go on from the last line read
    (truncated, another one, or a copy that gets an older file late) is read from its start:
    readers know records again by their ``record_id``. ``after``: closed files that hold no higher
    ``seq`` are passed by.
    """

    def __init__(self, path: Path, cursor: Cursor | None = None, *, after: int = 0) -> None:
        self.path = path
        self.cursor = cursor or Cursor()
        #: how often reading began again at the start of the ledger.
        self.restarts = 0
        #: where the lines lie that were read last.
        self.file = path
        self._after = after
        self._descriptor = -1
        #: the newest line read: what a file must hold before ``offset`` to be the same ledger.
        self._last = b"\n" if self.cursor.offset else b""
        #: the closed files at the last look; None: a cursor from an earlier life knows of none.
        self._closed: list[Segment] | None = None

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
        return [line for batch in self.batches() for line in batch]

    def batches(self) -> Iterator[list[bytes]]:
        """Give the lines that ``read`` returns, a few megabytes at a time; raises OSError."""
        restarts = self.restarts
        if self._descriptor >= 0:
            # looked up before reading: nobody writes to a file after it was moved away
            moved = self._has_moved()
            yield from self._rest()
            if self._descriptor >= 0 and not moved:
                return
        yield from self._onward()
        if self._descriptor < 0 and self.restarts != restarts:
            yield from self._onward()

    def _has_moved(self) -> bool:
        try:
            return _identity(self.path) != (self.cursor.device, self.cursor.inode)
        except FileNotFoundError:
            return False

    def _onward(self) -> Iterator[list[bytes]]:
        """Read the file in which the cursor stands, and those behind it; the last stays open."""
        closed = closed_segments(self.path)
        paths = [*(one.path for one in closed), self.path]
        found = self._find(paths)
        if found is not None and self._came_late(closed[: found[0]]):
            found = None
        if found is None:
            if closed != closed_segments(self.path):
                return  # rotated at this moment: the next call finds it
            self._restart()
        self._closed = closed
        first, offset = found or (0, 0)
        if not self.cursor.offset:
            first = max(first, sum(one.last <= self._after for one in closed))
        for path in paths[first:]:
            descriptor = _open(path)
            if descriptor < 0:
                continue
            if path == self.path and closed != closed_segments(path):
                os.close(descriptor)  # what comes before it was closed meanwhile
                return
            self.close()
            self._descriptor, self.file = descriptor, path
            self.cursor = Cursor(*_identity(descriptor), offset)
            if offset == 0:
                self._last = b""
            offset = 0
            yield from self._rest()
            if self._descriptor < 0:
                return

    def _find(self, paths: list[Path]) -> tuple[int, int] | None:
        """Return which of the files the cursor stands in, and where; None: in none of them."""
        if self.cursor == Cursor():
            return 0, 0
        mine = (self.cursor.device, self.cursor.inode)
        for number, path in enumerate(paths):
            with suppress(FileNotFoundError):
                if _identity(path) == mine:
                    return number, self.cursor.offset
        if not self.cursor.offset:  # nothing was read of the file, which is gone
            return 0, 0
        if self._last == b"\n":  # a cursor from an earlier life knows no line to tell a copy by
            return None
        # A copy of the ledger (rsync writes a new file each time) goes on where the last one was.
        for number, path in reversed(list(enumerate(paths))):
            if (descriptor := _open(path)) >= 0:
                try:
                    if self._goes_on(descriptor):
                        return number, self.cursor.offset
                finally:
                    os.close(descriptor)
        return None

    def _came_late(self, before: list[Segment]) -> bool:
        """Tell whether files before the cursor's are new: a copy is made file by file."""
        return self._closed is not None and any(one not in self._closed for one in before)

    def _goes_on(self, descriptor: int) -> bool:
        before = len(self._last)
        offset = self.cursor.offset - before
        return offset >= 0 and os.pread(descriptor, before, offset) == self._last

    def _restart(self) -> None:
        """Begin again with the first line of the ledger."""
        self.close()
        self.cursor = Cursor()
        self._last = b""
        self.restarts += 1

    def _rest(self) -> Iterator[list[bytes]]:
        """Give the whole lines from the cursor to the end of the open file."""
        length = _BATCH_BYTES
        while self._descriptor >= 0:
            if not self._goes_on(self._descriptor):
                self._restart()
                return
            content = os.pread(self._descriptor, length, self.cursor.offset)
            lines, _torn = split_lines(content)
            if lines:
                offset = self.cursor.offset + sum(len(line) + 1 for line in lines)
                self.cursor = Cursor(self.cursor.device, self.cursor.inode, offset)
                self._last = lines[-1] + b"\n"
                yield lines
            elif len(content) == length:
                length *= 2  # a line that is longer than a batch
                continue
            if len(content) < length:
                return


def _open(path: Path) -> int:
    """Open a file for reading; -1 when there is none."""
    try:
        # (a pipe is not waited for: reading at an offset then fails)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _identity(file: Path | int) -> tuple[int, int]:
    status = file.stat() if isinstance(file, Path) else os.fstat(file)
    return status.st_dev, status.st_ino


def read_records(path: Path) -> list[AnyRecord]:
    """Return the records of the ledger ``path`` now, without a torn tail; none if there is no file.

    Types that this version does not know are left out. Raises LedgerError for a broken line.
    """
    files: dict[Path, list[bytes]] = {}
    with Follower(path) as follower:
        for batch in follower.batches():
            files.setdefault(follower.file, []).extend(batch)
    if (last := files.get(path)) and not is_json(last[-1]):
        last.pop()
    decoded = (record for file, lines in files.items() for record in decode_lines(lines, file))
    return [record for record in decoded if not isinstance(record, Newer)]


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
