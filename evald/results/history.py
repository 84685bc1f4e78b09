"""Points that have ended, found again in the ledger's file with all that was recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from evald.errors import LedgerError
from evald.point import Kind, PointKey
from evald.results.follow import REPAIR
from evald.results.records import AnyRecord, PointRecord, SetRecord, decode


class Span(msgspec.Struct, frozen=True):
    """Where a line lies in the file, in bytes."""

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
    """The ended points of one run. Reads the file once, and then only the lines it is asked for.

    Blocking; raises OSError. Lines of types that this version does not know are passed by.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    def points(self) -> list[Ended]:
        """Return the points in order of their end."""
        sets: dict[PointKey, dict[str, Span]] = {}
        ended: dict[PointKey, Ended] = {}
        offset = 0
        with self._path.open("rb") as file:
            for line in file:
                span = Span(offset, len(line))
                offset += len(line)
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

    def read(self, one: Ended) -> tuple[PointRecord, dict[str, SetRecord]]:
        """Return the records of a point; raises LedgerError when they are no longer there."""
        sets: dict[str, SetRecord] = {}
        with self._path.open("rb") as file:
            point = self._decode(file, one.line)
            for name, span in one.sets.items():
                record = self._decode(file, span)
                if isinstance(record, SetRecord):
                    sets[name] = record
        if not isinstance(point, PointRecord) or sets.keys() != one.sets.keys():
            raise self._changed(one.line)
        return point, sets

    def _decode(self, file: BinaryIO, span: Span) -> AnyRecord:
        file.seek(span.offset)
        try:
            return decode(file.read(span.length))
        except msgspec.DecodeError as error:
            raise self._changed(span) from error

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
