"""What the ledger has of each point, found again when it is asked for."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

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


class PointRecords:
    """Knows where the records of each point lie; what is needed of them is read again.

    Blocking calls of ``link`` run in threads.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.seq = 0
        #: seq of the first record of each revision.
        self._first: dict[PointName, dict[int, int]] = {}
        #: seq of the terminal record, and whether the point was measured.
        self._ends: dict[PointName, dict[int, tuple[int, bool]]] = {}
        #: revisions of weights that an earlier one has measured: they answer no request.
        self._regraded: dict[PointName, set[int]] = {}

    def forget(self) -> None:
        """Begin again at the start."""
        self.seq = 0
        self._first.clear()
        self._ends.clear()
        self._regraded.clear()

    async def catch_up(self) -> None:
        """Take in what was appended since."""
        while records := await asyncio.to_thread(self._link.records, self.seq):
            for record in records:
                self.seq = record["seq"]
                if record["type"] not in {"accepted", "set", "point"}:
                    continue
                point, revision = point_name(record), record["revision"]
                self._first.setdefault(point, {}).setdefault(revision, self.seq)
                if record["type"] == "point":
                    measured = record["outcome"] != Outcome.SKIPPED
                    self._ends.setdefault(point, {})[revision] = self.seq, measured
                    if "regraded_from" in record["provenance"]:
                        self._regraded.setdefault(point, set()).add(revision)

    def newest(self, point: PointName) -> int | None:
        """Return the highest revision known."""
        return max(self._first.get(point, {}), default=None)

    def newest_after(self, point: PointName, seq: int) -> int | None:
        """Return the highest revision with weights of its own that was not known up to ``seq``."""
        firsts, regraded = self._first.get(point, {}), self._regraded.get(point, set())
        return max(
            (one for one, first in firsts.items() if first > seq and one not in regraded),
            default=None,
        )

    def has_ended(self, point: PointName, revision: int) -> bool:
        """Tell whether its terminal record is there."""
        return revision in self._ends.get(point, {})

    def newest_measured(self, point: PointName) -> int | None:
        """Return the highest revision that ended with a result."""
        ends = self._ends.get(point, {})
        return max((revision for revision, (_, measured) in ends.items() if measured), default=None)

    async def answer(self, point: PointName, revision: int) -> Answer:
        """Read the records of an ended point; raises NotMeasured for a skipped one.

        A daemon that does not answer now is asked again, until the caller's deadline.
        """
        after, (last, _) = self._first[point][revision] - 1, self._ends[point][revision]
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
                elif after == last:
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
