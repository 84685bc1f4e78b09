"""Points that have ended, found again in the ledger's files with all that was recorded of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from evald.errors import LedgerError
from evald.point import Kind, PointKey
from evald.results.follow import REPAIR, Follower
from evald.results.records import AnyRecord, PointRecord, SetRecord, decode
from evald.results.segments import closed_segments


class Span(msgspec.Struct, frozen=True):
    """Where a line lies: device and inode of its file, and bytes in it."""

    file: tuple[int, int]
    offset: int
    length: int


class Ended(msgspec.Struct, frozen=True):
    """A point with a terminal record; ``n_total``: samples that it was judged by, 0 for none."""

    key: PointKey
    n_total: int
    line: Span
    #: set records by name, the newest of each, whether they still stand or not.
    sets: dict[str, Span]


class _Counts(msgspec.Struct):
    n_total: int = 0


class _Head(msgspec.Struct):
    """The part of a record that says what it is about."""

    type: str
    run: str = ""
    step: int = 0
    revision: int = 0
    kind: Kind = Kind.STEP
    set: str = ""
    counts: _Counts = msgspec.field(default_factory=_Counts)


class History:
    """The ended points of one run. Reads the ledger once, and then only the lines it is asked for.

    Blocking; raises OSError. Lines of types that this version does not know are passed by.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    def points(self) -> list[Ended]:
        """Return the points in order of their end."""
        sets: dict[PointKey, dict[str, Span]] = {}
        ended: dict[PointKey, Ended] = {}
        for span, line in self._lines():
            head = _head(line)
            if head is None or head.run != self._run or head.type not in {"set", "point"}:
                continue
            key = PointKey(head.run, head.step, head.revision, head.kind)
            of_point = sets.setdefault(key, {})
            if head.type == "set":
                of_point[head.set] = span
            else:
                ended[key] = Ended(key, head.counts.n_total, span, of_point)
        return list(ended.values())

    def _lines(self) -> Iterator[tuple[Span, bytes]]:
        with Follower(self._path) as follower:
            for lines in follower.batches():
                end = follower.cursor
                file = (end.device, end.inode)
                offset = end.offset - sum(len(line) + 1 for line in lines)
                for line in lines:
                    yield Span(file, offset, len(line)), line
                    offset += len(line) + 1

    def read(self, one: Ended) -> tuple[PointRecord, dict[str, SetRecord]]:
        """Return the records of a point; raises LedgerError when they are no longer there."""
        sets: dict[str, SetRecord] = {}
        point = self._decode(one.line)
        for name, span in one.sets.items():
            record = self._decode(span)
            if isinstance(record, SetRecord):
                sets[name] = record
        if not isinstance(point, PointRecord) or sets.keys() != one.sets.keys():
            raise self._changed(one.line)
        return point, sets

    def _decode(self, span: Span) -> AnyRecord:
        """Read a line again; its file may have been closed, under another name, meanwhile."""
        for path in (*(one.path for one in closed_segments(self._path)), self._path):
            with suppress(FileNotFoundError), path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != span.file:
                    continue
                file.seek(span.offset)
                try:
                    return decode(file.read(span.length))
                except msgspec.DecodeError as error:
                    raise self._changed(span) from error
        raise self._changed(span)

    def _changed(self, span: Span) -> LedgerError:
        return LedgerError(
            f"cannot read ledger {self._path} at byte {span.offset}: it has changed since it was "
            f"read first; {REPAIR}"
        )


def _head(line: bytes) -> _Head | None:
    try:
        return _heads.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None


_heads: msgspec.json.Decoder[_Head] = msgspec.json.Decoder(_Head)
