"""Pages of the ledger by ``seq``, for readers that ask again and again."""

from __future__ import annotations

import bisect
import itertools
import threading
from pathlib import Path

import msgspec

from evald.results.follow import Cursor, Follower

#: records between two that are remembered, at first; and how many are remembered at most.
STRIDE = 64
MAX_MARKS = 8192
#: a page ends once it is that large, whatever its limit of records.
MAX_PAGE_BYTES = 8 << 20


class _Seq(msgspec.Struct):
    seq: int


_decoder = msgspec.json.Decoder(_Seq)


class RecordPages:
    """Reads the part of the ledger that a reader asks for, not all of it each time.

    Remembers where some of the records begin: each 64th; each 128th once the ledger is long, and
    so on, so that memory stays bounded. A ledger that was replaced is looked through again.
    Blocking; any thread may ask.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._follower = Follower(path)
        self._restarts = 0
        self._forget()

    def page(self, after: int, limit: int) -> bytes:
        """Return at most ``limit`` whole lines with a ``seq`` above ``after``, oldest first.

        A page of more than 8 MiB is cut short. Lines that are no records are left out. Raises
        OSError; a ledger that is not there yet has no lines.
        """
        with self._lock:
            with self._follower:  # (closed, it knows how far it is)
                self._catch_up()
            return self._read(after, limit)

    def _forget(self) -> None:
        #: seq of records, going up, and where each begins.
        self._marks: list[tuple[int, Cursor]] = []
        self._stride = STRIDE
        self._since_mark = 0

    def _catch_up(self) -> None:
        for lines in self._follower.batches():
            if self._follower.restarts != self._restarts:
                self._restarts = self._follower.restarts
                self._forget()
            end = self._follower.cursor
            offset = end.offset - sum(len(line) + 1 for line in lines)
            for line in lines:
                if self._since_mark == 0:
                    self._mark(line, Cursor(end.device, end.inode, offset))
                self._since_mark = (self._since_mark + 1) % self._stride
                offset += len(line) + 1

    def _mark(self, line: bytes, begin: Cursor) -> None:
        seq = seq_of(line)
        if seq is None or (self._marks and seq <= self._marks[-1][0]):
            return
        self._marks.append((seq, begin))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._stride *= 2

    def _read(self, after: int, limit: int) -> bytes:
        number = bisect.bisect_right(self._marks, after + 1, key=lambda mark: mark[0])
        begin = self._marks[number - 1][1] if number else None
        page, count = bytearray(), 0
        with Follower(self._path, begin, after=after) as follower:
            for line in itertools.chain.from_iterable(follower.batches()):
                if count >= limit or len(page) > MAX_PAGE_BYTES:
                    break
                seq = seq_of(line)
                if seq is not None and seq > after:
                    page += line + b"\n"
                    count += 1
        return bytes(page)


def seq_of(line: bytes) -> int | None:
    """Return the ``seq`` of a line of the ledger; None for a line that is no record."""
    try:
        return _decoder.decode(line).seq
    except (msgspec.DecodeError, RecursionError):
        return None
