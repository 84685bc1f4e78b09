"""Rules about the daemon itself: ``silent``, ``quarantined``, ``disk``."""

from __future__ import annotations

from evald.alerts.verdict import Rule, Verdict
from evald.config_alerts import AlertRule
from evald.engines.state import ALIVE
from evald.results.records import Accepted, AnyRecord, PointRecord, RunEnd, SetRecord
from evald.status.view import StatusView

#: room is there again once so much more than the limit is free.
_ENOUGH_AGAIN = 1.1
#: from here on silence is said in minutes.
_MINUTES_FROM_S = 120.0


class Silent(Rule):
    """No point ends, though the newest run goes on.

    The time before the daemon's start does not count: nobody could have ended a point.
    """

    def __init__(self, config: AlertRule) -> None:
        super().__init__(config)
        self._limit_s = config.after_s or 0.0
        #: newest run that has not ended, and all of those.
        self._open = ""
        self._begun: set[str] = set()
        #: when the silence began: by the wall clock, and by the uptime, which nobody sets.
        self._last_s = self._known_s = 0.0
        self._last_up_s = 0.0

    def note(self, record: AnyRecord) -> list[Verdict]:
        """Learn what is expected."""
        # (a point that is tried or graded again does not begin a run that has ended)
        if isinstance(record, Accepted | SetRecord | PointRecord) and not record.revision:
            self._open = record.run
            if record.run not in self._begun:
                self._begun.add(record.run)
                self._last_s = record.time
        if isinstance(record, RunEnd):
            self._begun.discard(record.run)
            if record.run == self._open:
                self._open = ""
        if isinstance(record, PointRecord):
            self._last_s = record.time
        return []

    def check(self, view: StatusView, now_s: float) -> list[Verdict]:
        """Compare with the time that has passed since the last record counted."""
        if self._last_s != self._known_s:
            self._known_s = self._last_s
            self._last_up_s = view.uptime_s - max(0.0, now_s - self._last_s)
        quiet_s = view.uptime_s - self._last_up_s
        holds: bool | None = None
        if not self._open or quiet_s <= self._limit_s:
            holds = False
        elif view.uptime_s > self._limit_s:
            holds = True
        serving = sum(engine.state == "serving" for engine in view.engines)
        state = (
            f"{len(view.queued)} queued, {len(view.running)} running, {serving} of "
            f"{len(view.engines)} engines serving; see `evald status`"
        )
        quiet = f"{quiet_s / 60:.0f} minutes" if quiet_s >= _MINUTES_FROM_S else f"{quiet_s:.0f} s"
        detail = (
            f"no point has ended for {quiet}, and run {self._open!r} has not ended: {state}"
            if self._open and quiet_s > self._limit_s
            else f"points end again, or the run is over: {state}"
        )
        return [Verdict(subject="points", holds=holds, detail=detail)]


class Quarantined(Rule):
    """An engine has failed too often and stays down."""

    def check(self, view: StatusView, now_s: float) -> list[Verdict]:
        """Look at each engine; one that starts again is not well yet."""
        del now_s
        verdicts = []
        for engine in view.engines:
            held = engine.state == "quarantined"
            detail = (
                f"engine {engine.name} is quarantined: {engine.detail}; repair the cause, then "
                f"run `evald ctl release {engine.name}`"
                if held
                else f"engine {engine.name} is {engine.state}"
            )
            holds = True if held else (False if engine.state in ALIVE else None)
            verdicts.append(Verdict(subject=engine.name, holds=holds, detail=detail))
        return verdicts


class Disk(Rule):
    """A file system has little room left."""

    def check(self, view: StatusView, now_s: float) -> list[Verdict]:
        """Look at what is known of them; a root that is away has no room to speak of."""
        del now_s
        known: list[tuple[str, str, int, int]] = []
        if view.disk is not None:
            disk = view.disk
            known.append(
                ("results", view.results, disk.results_free_bytes, disk.results_total_bytes)
            )
        if view.staging is not None and view.staging.total_bytes:
            staging = view.staging
            known.append(("staging", staging.root, staging.free_bytes, staging.total_bytes))
        return [
            self._judge(name, path, free, total)
            for name, path, free, total in known
            if self.config.where in (None, name)
        ]

    def _judge(self, name: str, path: str, free: int, total: int) -> Verdict:
        limit = max(self.config.below_bytes or 0, (self.config.below_share or 0.0) * total)
        holds = True if free < limit else (False if free >= limit * _ENOUGH_AGAIN else None)
        detail = (
            f"the file system of the {name} ({path}) has {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            f"free (alert below {limit / 1e9:.1f} GB)"
        )
        return Verdict(subject=name, holds=holds, detail=detail)
