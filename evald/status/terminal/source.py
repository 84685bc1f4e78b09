"""What a watcher has seen of a daemon, which may go away and come back: status, newest records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from evald.errors import EvaldError
from evald.point import Kind
from evald.results.records import Alert, PointRecord, decode_any
from evald.status.client import Door, fetch_records, fetch_status
from evald.status.pages import seq_of
from evald.status.view import StatusView

TIMEOUT_S = 5.0
#: a first look goes back by so many records; points and alerts beyond their bounds are forgotten.
FIRST_LOOK = 300
_MAX_POINTS = 200
_MAX_ALERTS = 20

_T = TypeVar("_T", PointRecord, Alert)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to show."""

    view: StatusView
    points: list[PointRecord] = []
    alerts: list[Alert] = []


class Source:
    """Asks the daemon; what was answered last stays while it does not answer.

    ``find`` gives the daemon's door; blocking, it raises EvaldError. It is asked again after every
    failure: a daemon that was restarted may have another socket.
    """

    def __init__(self, find: Callable[[], Door]) -> None:
        self._find = find
        self._door: Door | None = None
        self._recent = Recent()
        #: what of the ledger was read, and of which one.
        self._seq: int | None = None
        self._results = ""
        self.shown: Shown | None = None
        #: why there is no fresh answer; empty while there is one.
        self.fault = ""
        self._since_s = 0.0

    @property
    def fault_s(self) -> float:
        """Seconds since the last answer, while there is a fault."""
        return time.monotonic() - self._since_s

    async def refresh(self) -> Shown:
        """Ask once; raises EvaldError (and NotRunning) when it was not answered."""
        try:
            if self._door is None:
                self._door = await asyncio.to_thread(self._find)
            view = await fetch_status(self._door, timeout_s=TIMEOUT_S)
            await self._read_records(self._door, view)
        except EvaldError as error:
            self._door = None
            self.fault = str(error)
            raise
        self.fault, self._since_s = "", time.monotonic()
        points, alerts = self._recent.points(), self._recent.alerts()
        self.shown = Shown(view=view, points=points, alerts=alerts)
        return self.shown

    async def _read_records(self, door: Door, view: StatusView) -> None:
        """Read what is new in the ledger; of a ledger that is new, the end."""
        if self._seq is None or view.last_seq < self._seq or view.results != self._results:
            self._recent = Recent()
            self._seq, self._results = max(view.last_seq - FIRST_LOOK, 0), view.results
        while self._seq < view.last_seq:
            lines, newest = await fetch_records(door, self._seq, timeout_s=TIMEOUT_S)
            if not lines or newest < self._seq:  # another ledger, or cut away: next time
                self._seq = None
                return
            self._recent.take(lines)
            self._seq = seq_of(lines[-1]) or newest


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
