"""What a record gives a logger to draw: the values that are new, each once, at the point's step."""

from __future__ import annotations

import bisect
import math

import msgspec

from evald.point import Kind, Outcome
from evald.results.records import AnyRecord, PointRecord, SetRecord

STEP = "eval/step"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The new values of one record, to be drawn at ``step``.

    A ``set`` record gives its metrics early. The terminal record of the point gives what is
    missing. A later revision gives its own: where a logger can, they replace what stands there.
    """

    seq: int
    record_id: str
    #: ``time.time()`` of the record.
    time: float
    run: str
    step: int
    revision: int = 0
    kind: Kind = Kind.STEP
    #: flat; without ``eval/step``. NaN: what was shown of the point early stands no longer.
    metrics: dict[str, float]
    #: this is the terminal record's.
    ended: bool = False
    #: of the terminal record; empty before.
    outcome: str = ""
    reason: str = ""
    #: sets of the point that stand, in order of their end; only when ``ended``.
    sets: tuple[str, ...] = ()
    #: record id of the newest measured point before this step; empty: there is none.
    previous: str = ""


class _Revision(msgspec.Struct):
    number: int
    ended: bool = False
    #: set name -> record id.
    sets: dict[str, str] = {}
    #: shown by set records.
    early: dict[str, float] = {}


class _Shown(msgspec.Struct):
    """What stands at one step."""

    newest: _Revision
    #: by terminal records.
    measured: dict[str, float] = {}
    #: by anything.
    drawn: dict[str, float] = {}


class Rows:
    """Turns the records of one run, in the ledger's order, into rows.

    A record that comes again gives nothing new, nor do those of a revision that a higher one
    has followed.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[Kind, int], _Shown] = {}
        #: steps that were measured, in order, and the record id of the newest revision of each.
        self._steps: list[int] = []
        self._measured: dict[int, str] = {}

    def take(self, record: AnyRecord) -> Row | None:
        """Return what a record shows; None for one that shows nothing."""
        if not isinstance(record, SetRecord | PointRecord):
            return None
        number = record.revision
        place = (record.kind, record.step)
        shown = self._points.get(place)
        if shown is None:
            shown = self._points[place] = _Shown(_Revision(number))
        elif number < shown.newest.number:
            return None
        elif number > shown.newest.number:
            shown.newest = _Revision(number)
        if isinstance(record, SetRecord):
            return self._early(shown, record)
        return self._ended(shown, record)

    def _early(self, shown: _Shown, record: SetRecord) -> Row | None:
        if shown.newest.ended:
            return None
        values = _values(record.metrics)
        shown.newest.sets[record.set] = record.record_id
        shown.newest.early |= values
        fresh = _fresh(shown, values)
        return _row(record, metrics=fresh) if fresh else None

    def _ended(self, shown: _Shown, record: PointRecord) -> Row | None:
        newest = shown.newest
        again, newest.ended = newest.ended, True
        values = _values(record.metrics)
        if record.outcome is Outcome.SKIPPED:
            # no revision that was measured loses its values to one that was not
            stands = {**shown.measured, **values}
        else:
            stands = values
            shown.measured = values
            self._note(record)
        gone = {
            name: math.nan
            for name, value in shown.drawn.items()
            if name not in stands and not math.isnan(value)
        }
        stale = {name for name in shown.drawn if name in stands} - values.keys()
        restored = {name: stands[name] for name in stale}
        fresh = _fresh(shown, {**gone, **restored, **values})
        if again and not fresh:
            return None
        void = set(record.void_sets)
        return _row(
            record,
            metrics=fresh,
            ended=True,
            outcome=str(record.outcome),
            reason=record.reason,
            sets=tuple(name for name, id_ in newest.sets.items() if id_ not in void),
            previous=self._before(record.step),
        )

    def _note(self, record: PointRecord) -> None:
        if record.step not in self._measured:
            bisect.insort(self._steps, record.step)
        self._measured[record.step] = record.record_id

    def _before(self, step: int) -> str:
        """Return the newest measured point before a step."""
        index = bisect.bisect_left(self._steps, step)
        return self._measured[self._steps[index - 1]] if index else ""


def _values(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != STEP}


def _fresh(shown: _Shown, values: dict[str, float]) -> dict[str, float]:
    """Return those values that are not what is drawn already, and note them."""
    fresh = {name: value for name, value in values.items() if shown.drawn.get(name) != value}
    shown.drawn |= fresh
    return fresh


def _row(
    record: SetRecord | PointRecord,
    *,
    metrics: dict[str, float],
    ended: bool = False,
    outcome: str = "",
    reason: str = "",
    sets: tuple[str, ...] = (),
    previous: str = "",
) -> Row:
    return Row(
        seq=record.seq,
        record_id=record.record_id,
        time=record.time,
        run=record.run,
        step=record.step,
        revision=record.revision,
        kind=record.kind,
        metrics=metrics,
        ended=ended,
        outcome=outcome,
        reason=reason,
        sets=sets,
        previous=previous,
    )
