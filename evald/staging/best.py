"""The best snapshot stays: copied to a directory of its own before anything can retire it.

A copy that cannot be made (the disk is full) is owed: its snapshot is held, and tried again, until
it is copied or a better one of its run has been measured. The ledger tells a later life the same.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import structlog

from evald.config import KeepBest
from evald.errors import LedgerError
from evald.point import Kind, Outcome, PointKey, Snapshot
from evald.results.follow import read_records
from evald.results.records import PointRecord
from evald.staging.best_copy import Best, BestCopies, Lost, NotKept
from evald.staging.notices import Alerting

log = structlog.get_logger(__name__)

#: pauses between two tries of a copy that could not be made.
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0


class BestKeeper:
    """Compares each point that ends with the best snapshot of its run, and keeps the better one.

    ``results_file`` is the ledger, for points that ended in an earlier life. ``on_alert`` hears one
    sentence when a copy cannot be made. Points that are not ``ok`` and baselines do not compete.
    """

    def __init__(
        self,
        config: KeepBest,
        *,
        marker: str,
        results_file: Path,
        on_alert: Alerting | None = None,
    ) -> None:
        self._config = config
        self._copies = BestCopies(config, marker)
        self._results_file = results_file
        self._on_alert = on_alert
        self._lock = asyncio.Lock()
        #: by run: could not be copied yet.
        self._owed: dict[str, Best] = {}
        self._owes = asyncio.Event()
        #: that nothing can be copied now was told.
        self._told_owing = False
        self._told_missing = False
        self._told_lost: set[str] = set()

    def close(self) -> None:
        """Let a copy that is being made end early; the next life makes it."""
        self._copies.stop()

    async def consider(self, record: PointRecord, snapshot: Snapshot) -> None:
        """Copy the snapshot of a point that has ended with ``record``, if it is the best so far."""
        if snapshot.weight_version is None:
            await self._keep(record, snapshot.directory, snapshot.fingerprint)

    async def consider_again(self, key: PointKey, directory: Path, expected: str) -> None:
        """Do the same for a point that ended in an earlier life, which may have died over it."""
        async with self._lock:
            try:
                record = await asyncio.to_thread(self._find, key)
            except (LedgerError, OSError) as error:
                log.debug("record_not_found", point=str(key), error=str(error))
                return
        if record is not None:
            await self._keep(record, directory, expected)

    async def _keep(self, record: PointRecord, directory: Path, expected: str) -> None:
        """Copy the directory if it holds the best snapshot; ``expected``: its fingerprint."""
        if record.outcome is not Outcome.OK or record.kind is not Kind.STEP:
            return
        value = record.metrics.get(self._config.metric, math.nan)
        if not math.isfinite(value):
            await self._tell_missing(record)
            return
        one = Best(record, value, directory, expected)
        async with self._lock:
            owed = self._owed.get(record.run)
            if owed is None or owed.directory == directory or self._copies.beats(value, owed.value):
                await self._settle(one)

    def holds(self, directory: Path) -> bool:
        """Tell whether a snapshot must stay, because its copy is owed; one of each run does."""
        return any(one.directory == directory for one in self._owed.values())

    async def retry(self) -> None:
        """Wait until something is owed, and try that again until some of it is settled."""
        await self._owes.wait()
        pause_s = _FIRST_PAUSE_S
        while owed := list(self._owed.values()):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            async with self._lock:
                for one in owed:
                    if self._owed.get(one.record.run) is one:
                        await self._settle(one)
            if len(self._owed) < len(owed):
                return
        self._owes.clear()

    async def _settle(self, one: Best) -> None:
        """Copy it, or owe the copy."""
        run = one.record.run
        try:
            kept = await asyncio.to_thread(self._copies.make, one)
        except Lost as lost:
            self._owed.pop(run, None)
            if str(lost) not in self._told_lost:
                self._told_lost.add(str(lost))
                await self._alert("best_not_kept", str(lost))
            return
        except NotKept as fault:
            self._owed[run] = one
            self._owes.set()
            if not self._told_owing and not self._copies.stopping:
                self._told_owing = True
                await self._alert("best_not_kept", str(fault))
            return
        self._owed.pop(run, None)
        if kept is not None:
            self._told_owing = False
            log.info("best_kept", point=one.record.record_id, value=one.value, directory=str(kept))

    async def _tell_missing(self, record: PointRecord) -> None:
        if not self._told_missing:
            self._told_missing = True
            names = ", ".join(sorted(record.metrics))
            await self._alert(
                "best_not_known",
                f"cannot tell the best snapshot: {record.record_id} has no metric "
                f"{self._config.metric}; set keep_best.metric to one of {names}",
            )

    async def _alert(self, name: str, detail: str) -> None:
        log.warning(name, detail=detail)
        if self._on_alert is not None:
            await self._on_alert(name, detail)

    def _find(self, key: PointKey) -> PointRecord | None:
        for record in reversed(read_records(self._results_file)):
            if isinstance(record, PointRecord) and record.record_id == key.record_id:
                return record
        return None
