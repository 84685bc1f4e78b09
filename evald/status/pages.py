"""Pages of the ledger by ``seq``, for readers that ask again and again."""

from __future__ import annotations

import bisect
import os
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

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
        self._forget()
        self._identity = (0, 0)

    def page(self, after: int, limit: int) -> bytes:
        """Return at most ``limit`` whole lines with a ``seq`` above ``after``, oldest first.

        A page of more than 8 MiB is cut short. Lines that are no records are left out. Raises
        OSError; a ledger that is not there yet has no lines.
        """
        with self._lock:
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return b""
            with file:
                self._catch_up(file)
                return self._read(file, after, limit)

    def _forget(self) -> None:
        #: (seq, offset) of records, both going up.
        self._marks: list[tuple[int, int]] = []
        self._stride = STRIDE
        self._since_mark = 0
        #: whole lines are known up to here.
        self._end = 0

    def _catch_up(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._end:
            self._forget()
            self._identity = identity
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                return  # half written: the next look finds it whole
            if self._since_mark == 0:
                self._mark(line)
            self._since_mark = (self._since_mark + 1) % self._stride
            self._end += len(line)

    def _mark(self, line: bytes) -> None:
        seq = seq_of(line)
        if seq is None or (self._marks and seq <= self._marks[-1][0]):
            return
        self._marks.append((seq, self._end))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._stride *= 2

    def _read(self, file: BinaryIO, after: int, limit: int) -> bytes:
        number = bisect.bisect_right(self._marks, after + 1, key=lambda mark: mark[0])
        offset = self._marks[number - 1][1] if number else 0
        file.seek(offset)
        page, count = bytearray(), 0
        for line in file:
            offset += len(line)
            if offset > self._end or count >= limit or len(page) > MAX_PAGE_BYTES:
                break
            seq = seq_of(line)
            if seq is not None and seq > after:
                page += line
                count += 1
        return bytes(page)


def seq_of(line: bytes) -> int | None:
    """Return the ``seq`` of a line of the ledger; None for a line that is no record."""
    try:
        return _decoder.decode(line).seq
    except (msgspec.DecodeError, RecursionError):
        return None
