"""What the ledger has of each point, found again when it is asked for."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from evald.errors import EvaldError
from evald.point import Outcome
from evald.trainer.contract import Link

_AGAIN_S = 0.5
#: run, kind, step.
PointName = tuple[str, str, int]


class NotMeasured(EvaldError):
    """A point without result; ``reason`` is what it is skipped with."""

    def __init__(self, detail: str, *, reason: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Answer(NamedTuple):
    """The terminal record of a point that was measured, and its set records."""

    point: dict[str, Any]
    sets: list[dict[str, Any]]


class _Revision(msgspec.Struct):
    first_seq: int
    #: of the terminal record; None: it has not ended.
    last_seq: int | None = None
    is_measured: bool = False
    #: an earlier revision has measured these weights: it answers no request.
    is_regrade: bool = False


class PointRecords:
    """Knows where the records of each point lie; what is needed of them is read again.

    Blocking calls of ``link`` run in threads.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._restarts = link.restarts
        self.seq = 0
        self._points: dict[PointName, dict[int, _Revision]] = {}

    def forget(self) -> None:
        """Begin again at the start."""
        self.seq = 0
        self._points.clear()

    async def catch_up(self) -> None:
        """Take in what was appended since."""
        while True:
            records = await asyncio.to_thread(self._link.records, self.seq)
            if self._restarts != self._link.restarts:
                self._restarts = self._link.restarts
                self.forget()  # it is another ledger now
            elif not records:
                return
            else:
                self._take(records)

    def _take(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self.seq = record["seq"]
            if record["type"] not in {"accepted", "set", "point"}:
                continue
            revisions = self._points.setdefault(point_name(record), {})
            revision = revisions.setdefault(record["revision"], _Revision(self.seq))
            if record["type"] == "point":
                revision.last_seq = self.seq
                revision.is_measured = record["outcome"] != Outcome.SKIPPED
                revision.is_regrade = "regraded_from" in record["provenance"]

    def newest(self, point: PointName) -> int | None:
        """Return the highest revision known."""
        return max(self._points.get(point, {}), default=None)

    def newest_after(self, point: PointName, seq: int) -> int | None:
        """Return the highest revision with weights of its own that was not known up to ``seq``."""
        known = self._points.get(point, {}).items()
        return max(
            (n for n, one in known if one.first_seq > seq and not one.is_regrade), default=None
        )

    def has_ended(self, point: PointName, revision: int) -> bool:
        """Tell whether its terminal record is there."""
        one = self._points.get(point, {}).get(revision)
        return one is not None and one.last_seq is not None

    def newest_measured(self, point: PointName) -> int | None:
        """Return the highest revision that ended with a result."""
        known = self._points.get(point, {}).items()
        return max((number for number, one in known if one.is_measured), default=None)

    async def answer(self, point: PointName, revision: int) -> Answer:
        """Read the records of an ended point; raises NotMeasured for a skipped one.

        A daemon that does not answer now is asked again, until the caller's deadline.
        """
        known = self._points[point][revision]
        after = known.first_seq - 1
        sets: dict[str, dict[str, Any]] = {}
        while True:
            records = await asyncio.to_thread(self._link.records, after)
            for record in records:
                after = record["seq"]
                kind = record["type"]
                if kind not in {"set", "point"} or point_name(record) != point:
                    continue
                if record["revision"] == revision and kind == "set":
                    sets[record["set"]] = record
                elif after == known.last_seq:
                    return _judged(record, sets)
            if not records:
                await asyncio.sleep(_AGAIN_S)


def _judged(point: dict[str, Any], sets: dict[str, dict[str, Any]]) -> Answer:
    if point["outcome"] == Outcome.SKIPPED:
        raise NotMeasured(point["detail"] or "it was skipped", reason=point["reason"])
    void = set(point["void_sets"])
    return Answer(point, [one for one in sets.values() if one["record_id"] not in void])


def point_name(record: dict[str, Any]) -> PointName:
    """Return the point that a record is about, whatever its revision."""
    return record["run"], record["kind"], record["step"]
