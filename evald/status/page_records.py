"""Records as the status page and the report need them: what curves show, names of metrics once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from evald.status.pages import seq_of

#: of numbers; no curve shows more.
_DIGITS = 6
#: what sets, terminal records, alerts and run ends say; other lines are of no use to the page.
_SHOWN = frozenset({"set", "point", "alert", "run_end"})
#: metrics that say what the record itself says.
_REPEATED = frozenset({"eval/step", "eval/revision"})


#: run, kind, step, revision.
_Point = tuple[str, str, int, int]


class _Provenance(msgspec.Struct):
    #: a black box says what it wants.
    sets: Any = None
    regraded_from: Any = None


class _Told(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a line says and the page shows under the same names."""

    type: str
    seq: int
    time: float
    run: str
    step: int
    revision: int
    kind: str = "step"
    outcome: str = ""
    reason: str = ""
    detail: str = ""
    set: str = ""
    name: str = ""
    subject: str = ""
    cleared: bool = False
    seconds: float = 0.0
    counts: dict[str, int] = {}
    timings: dict[str, float] = {}
    curve_breaks: list[str] = []
    void_sets: list[str] = []


class _Line(_Told, kw_only=True):
    """The part of a line that is read."""

    record_id: str
    metrics: dict[str, float | None] = {}
    provenance: _Provenance = msgspec.field(default_factory=_Provenance)


class PageRecord(_Told, kw_only=True):
    """One record; of its counts those that are not 0."""

    id: str
    #: number of a name and value, in turn.
    metrics: list[float] = []
    #: names of the sets that it was measured with.
    sets: list[str] = []
    regraded_from: str = ""


class Batch(msgspec.Struct, kw_only=True):
    """Some records in order, and the names of metrics that are new with them."""

    #: of the last line, whether that is shown or not.
    last_seq: int
    names: list[str]
    records: list[PageRecord]


class PageRecords:
    """Turns lines of a ledger into records of the page; one object for each reader.

    Names of metrics are numbered as they appear, and each is told once.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def batch(self, lines: Iterable[bytes]) -> Batch:
        """Take in the next lines. Those that cannot be read are left out.

        Records of sets whose point ends in the same batch are left out, too: its own has all.
        """
        told = len(self._numbers)
        last_seq, shown = 0, []
        for raw in lines:
            try:
                line = _decoder.decode(raw)
            except (msgspec.DecodeError, RecursionError):
                last_seq = seq_of(raw) or last_seq
                continue
            last_seq = line.seq
            if line.type in _SHOWN:
                shown.append(line)
        ended = {_point(one) for one in shown if one.type == "point"}
        sets: dict[_Point, list[str]] = {}
        records = []
        for one in shown:
            if one.type == "set" and _point(one) in ended:
                sets.setdefault(_point(one), []).append(one.set)
            elif one.type == "point":
                records.append(self._record(one, sets.get(_point(one), [])))
            else:
                records.append(self._record(one, []))
        return Batch(last_seq=last_seq, names=list(self._numbers)[told:], records=records)

    def _record(self, line: _Line, with_records: list[str]) -> PageRecord:
        sets, again = line.provenance.sets, line.provenance.regraded_from
        told = {name: getattr(line, name) for name in _Told.__struct_fields__}
        told |= {
            "time": round(line.time, 3),
            "seconds": _short(line.seconds),
            "counts": {name: count for name, count in line.counts.items() if count},
            "timings": {name: _short(seconds) for name, seconds in line.timings.items()},
        }
        return PageRecord(
            **told,
            id=line.record_id,
            metrics=self._numbered(line.metrics),
            sets=list(dict.fromkeys([*(sets if isinstance(sets, dict) else []), *with_records])),
            regraded_from=again if isinstance(again, str) else "",
        )

    def _numbered(self, metrics: dict[str, float | None]) -> list[float]:
        flat: list[float] = []
        for name, value in metrics.items():
            if value is not None and name not in _REPEATED:
                flat += (self._numbers.setdefault(name, len(self._numbers)), _short(value))
        return flat


def _point(line: _Line) -> _Point:
    return line.run, line.kind, line.step, line.revision


def _short(value: float) -> float:
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short


_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)
