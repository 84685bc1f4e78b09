"""The end of a run: the trainer has said so, and every point of it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from evald.results.ledger import Ledger
from evald.results.records import RunEnd
from evald.staging.offers import RunEnded
from evald.staging.retention import Retention

log = structlog.get_logger(__name__)

#: a run's last step may become visible a moment after ``run.end`` (two scans apart).
_LAST_STEP_WAIT_S = 10.0


class RunEnds:
    """Reports runs that are over; ``on_end`` is called with each of them."""

    def __init__(
        self, *, ledger: Ledger, retention: Retention, on_end: Callable[[str], None]
    ) -> None:
        self._ledger = ledger
        self._retention = retention
        self._on_end = on_end
        #: run -> what the trainer said, and when it was seen (the loop's time).
        self._ending: dict[str, tuple[RunEnded, float]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a run is ending that still has open points."""
        return bool(self._ending)

    def add(self, end: RunEnded) -> None:
        """Take in what the trainer said."""
        self._ending[end.run] = (end, asyncio.get_running_loop().time())

    async def settle(self) -> None:
        """Report the runs that have no open point left, and whose last step is known."""
        index = self._ledger.index
        for run, (end, seen_at) in list(self._ending.items()):
            if any(point.key.run == run for point in index.open_points()):
                continue
            newest = index.newest_step(run)
            waited_s = asyncio.get_running_loop().time() - seen_at
            if (newest is None or newest < end.last_step) and waited_s < _LAST_STEP_WAIT_S:
                continue
            del self._ending[run]
            if not index.run_ended(run):
                await self._ledger.append(
                    RunEnd(
                        run=run,
                        step=end.last_step,
                        record_id=f"{run}/run_end",
                        points=index.outcome_counts(run),
                    )
                )
            await self._retention.consume(end.path)
            log.info("run_ended", run=run, last_step=end.last_step)
            self._on_end(run)
