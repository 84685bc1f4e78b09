"""The newest records of the ledger, as far as the status shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from evald.point import Kind, Outcome
from evald.results.records import Alert, PointRecord, decode_any, is_own_metric

#: a first look goes back by so many records; points and alerts beyond their bounds are forgotten.
FIRST_LOOK = 300
_MAX_POINTS = 200
_MAX_ALERTS = 20

_T = TypeVar("_T", PointRecord, Alert)

#: ``eval/{set}-...``: what stands beside a set's headline.
_BESIDE = re.compile(r".+-(?:(?:avg|pass|maj)@\d+|pass\^\d+|truncated_ratio|none_reward_ratio)")


class Recent:
    """Keeps the terminal records of points and the alerts, newest last; a replay replaces."""

    def __init__(self) -> None:
        self._points: dict[str, PointRecord] = {}
        self._alerts: dict[str, Alert] = {}

    def take(self, lines: Iterable[bytes]) -> None:
        """Take in lines of the ledger; what is no record is passed by."""
        for line in lines:
            try:
                record = decode_any(line)
            except msgspec.DecodeError:
                continue
            if isinstance(record, PointRecord):
                _put(self._points, record, _MAX_POINTS)
            elif isinstance(record, Alert):
                _put(self._alerts, record, _MAX_ALERTS)

    def alerts(self) -> list[Alert]:
        """Return the newest alerts but for those that are over, oldest first."""
        found: list[Alert] = []
        for alert in self._alerts.values():
            if alert.cleared:
                found = [one for one in found if _about(one) != _about(alert)]
            else:
                found.append(alert)
        return found

    def points(self) -> list[PointRecord]:
        """Return the points of the run that ended last: highest revisions, in order of steps."""
        newest = next(reversed(self._points.values()), None)
        if newest is None:
            return []
        best: dict[tuple[bool, int], PointRecord] = {}
        for record in self._points.values():
            key = (record.kind is Kind.STEP, record.step)
            if record.run == newest.run and (
                key not in best or best[key].revision <= record.revision
            ):
                best[key] = record
        return [best[key] for key in sorted(best)]


def _about(alert: Alert) -> tuple[str, str, str]:
    return alert.run, alert.name, alert.subject


def _put(records: dict[str, _T], record: _T, most: int) -> None:
    records.pop(record.record_id, None)
    records[record.record_id] = record
    while len(records) > most:
        del records[next(iter(records))]


def headlines(record: PointRecord) -> dict[str, float]:
    """Return the headline of each eval set and aggregate, by name."""
    if record.outcome is Outcome.SKIPPED:
        return {}
    found = {}
    for key, value in record.metrics.items():
        name = key.removeprefix("eval/")
        beside = "/" in name or is_own_metric(name) or _BESIDE.fullmatch(name)
        if not beside:
            found[name] = value
    return found
