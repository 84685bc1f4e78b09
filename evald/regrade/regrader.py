"""Points are graded again, one after another: samples, statistics, records of a new revision."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from evald.config import Config
from evald.errors import LedgerError
from evald.evals.earlier import EarlierPoints
from evald.evals.grading import Grading
from evald.evals.sets import LoadedSet
from evald.evals.statistics import Statistics
from evald.evals.worker_pool import Workers
from evald.point import Kind, PointKey
from evald.regrade.one_point import PointRegrade
from evald.regrade.one_set import SetRegrade
from evald.regrade.plan import Plan, Planner, PointPlan, What, told_sets
from evald.regrade.revision import NextKey, Revision
from evald.results.history import History
from evald.results.ledger import Ledger
from evald.results.modes import Modes
from evald.results.samples import SampleJournal

log = structlog.get_logger(__name__)


class Regrader:
    """Grades stored samples by ``sets``, eval sets as ``config`` has them now.

    ``workers`` do what evald's own code does, and are ended by ``close``; ``environ``: what graders
    of the user's see a part of. ``next_key`` gives a revision that is free; ``is_open`` tells
    whether a point queues or runs.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        *,
        config: Config,
        ledger: Ledger,
        next_key: NextKey,
        is_open: Callable[[PointKey], bool],
        workers: Workers,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._sets = {one.name: one for one in sets}
        self._ledger = ledger
        self._results_dir = Path(config.results.dir)
        self._modes = Modes.of(config.results)
        self._aggregates = config.aggregate
        self._limits = config.dispatch
        self._min_scored = {one.name: one.min_eval_samples or 0 for one in config.eval}
        self._next_key = next_key
        self._planner = Planner(
            self._sets, index=ledger.index, results_file=ledger.path, is_open=is_open
        )
        self._workers = workers
        self._grading = Grading(workers, environ=environ)
        self._earlier = EarlierPoints(ledger.index, self._results_dir)

    @property
    def grade_s(self) -> float:
        """How long one grade may take."""
        return max((one.eval_set.grader_timeout_s for one in self._sets.values()), default=0.0)

    async def plan(self, what: What) -> Plan:
        """Find out what is to be done; raises CannotRegrade."""
        try:
            return await asyncio.to_thread(self._planner.plan, what)
        except OSError as error:
            raise LedgerError(f"cannot read {self._ledger.path}: {error.strerror}") from error

    async def regrade(self, plan: PointPlan, on_sample: Callable[[], None]) -> str:
        """Grade one point again; return a sentence that says what came of it.

        ``on_sample`` is called with each sample that is graded. Raises CannotRegrade and
        LedgerError, and then there is no new revision; so it is when this is cancelled.
        """
        history = History(self._ledger.path, plan.source.key.run)
        record, told = await asyncio.to_thread(history.read, plan.source)
        log.info("regrade_begins", point=str(plan.source.key), sets=plan.regraded)
        revision = Revision(
            plan,
            ledger=self._ledger,
            results_dir=self._results_dir,
            modes=self._modes,
            next_key=self._next_key,
        )
        one = PointRegrade(
            plan,
            record,
            told,
            sets=self._sets,
            min_scored=self._min_scored,
            earlier=self._before(plan.source.key),
        )
        try:
            await asyncio.to_thread(revision.clear)
            for name in told_sets(record):
                if name in plan.kept:
                    await asyncio.to_thread(revision.keep, name)
                    one.keep(name)
                else:
                    await self._grade_set(one, name, revision, on_sample)
            sets, point = one.records(self._aggregates, self._limits)
            key = await revision.write(sets, point)
        except OSError as error:
            raise LedgerError(
                f"cannot regrade {plan.source.key}: {error.filename}: {error.strerror}"
            ) from error
        finally:
            revision.discard()
        sentence = f"{key} is {point.outcome.value}: {one.summary()}"
        log.info("regrade_done", point=str(key), regraded_from=record.record_id, detail=sentence)
        return sentence

    async def close(self) -> None:
        """End the grader processes; none is left afterwards."""
        await self._grading.close()
        await self._workers.close()

    def _before(self, key: PointKey) -> Mapping[str, str]:
        """Config digests of the sets of the measured point before this one."""
        if key.kind is Kind.BASELINE:
            return {}
        index = self._ledger.index
        before = index.measured(key.run, Kind.STEP, below=key.step)
        before = before or index.measured(key.run, Kind.BASELINE)
        return {name: seen.config for name, seen in before.sets.items()} if before else {}

    async def _grade_set(
        self, one: PointRegrade, name: str, revision: Revision, on_sample: Callable[[], None]
    ) -> None:
        prepared, before = one.prepared(name), one.before(name)
        journal = SampleJournal(revision.directory, name, modes=self._modes)
        regrade = SetRegrade(
            prepared.loaded,
            before,
            config=prepared.config_digest,
            grading=self._grading,
            on_sample=on_sample,
        )
        counts = await regrade.run(self._results_dir, journal)
        statistics = Statistics(self._workers, before.key, self._earlier)
        metrics = await statistics.of_set(prepared, before.digest, journal.path)
        one.graded(name, counts, metrics, regrade.problem)
