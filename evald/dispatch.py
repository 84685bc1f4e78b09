"""Admission: what staging offers becomes points, and every point ends in one terminal record."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from evald.config import Dispatch
from evald.errors import EvaldError
from evald.judge import accepted_record, skipped_record
from evald.measure import Measure
from evald.point import (
    EvalPoint,
    Kind,
    Outcome,
    PointKey,
    SkipReason,
    Snapshot,
    absent_point,
)
from evald.pulse import Pulse
from evald.results.ledger import Ledger
from evald.results.records import PointRecord, SetRecord
from evald.run_ends import RunEnds
from evald.staging.offers import InvalidPoint, LostPoint, Offer, RunEnded, TrainerSkip
from evald.staging.retention import Retention
from evald.status.view import PointView, SetView
from evald.turns import RunsInTurn, Turns

log = structlog.get_logger(__name__)

#: a run that is ending, and a disk that was full, is looked at this often without an event.
_LOOK_AGAIN_S = 1.0
_LOOK_ANYWAY_S = 5.0
#: what a point may take beyond its deadline: the last grades, statistics, records, deletions.
_SLACK_S = 1800.0


class _Entry(msgspec.Struct):
    """A point that queues or runs: its state, and since when (loop's time)."""

    point: EvalPoint
    state: str
    since: float
    #: the loop's time of its acceptance.
    accepted: float
    pulse: Pulse
    work: asyncio.Task[PointRecord] | None = None
    #: why an operator ended it.
    aborted: str = ""


class Dispatcher:
    """Queues points in order of arrival and runs at most ``max_in_flight`` of them.

    ``progress`` shows the sets of a point that runs. ``shortage`` says why the staging root has no
    room for one more snapshot; None: it has. ``baseline`` makes a run's baseline point, which goes
    before the run's first step.
    """

    def __init__(
        self,
        config: Dispatch,
        *,
        ledger: Ledger,
        measure: Measure,
        progress: Callable[[PointKey], list[SetView]],
        retention: Retention,
        shortage: Callable[[], Awaitable[str | None]],
        run_ends: RunEnds,
        baseline: Callable[[str], EvalPoint] | None = None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._measure = measure
        self._progress = progress
        self._retention = retention
        self._shortage = shortage
        self._run_ends = run_ends
        self._baseline = baseline
        self._baselined: set[str] = set()
        self._queue: dict[PointKey, _Entry] = {}
        self._running: dict[PointKey, _Entry] = {}
        #: their records are being written and their snapshots given up.
        self._ending: set[PointKey] = set()
        self._turns = Turns()
        self._runs = RunsInTurn()
        #: staging offers from several tasks; what is looked up in the index and what is then
        #: appended belong together.
        self._admission = asyncio.Lock()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._draining = False
        #: an operator holds back what queues.
        self.paused = False
        self._pulse = Pulse("dispatch")

    # --- what staging offers -------------------------------------------------------------------

    async def offer(self, offer: Offer) -> None:
        """Take in what staging found; returns when it is durable."""
        match offer:
            case EvalPoint():
                await self._admit(offer)
            case InvalidPoint(point=point, detail=detail):
                await self._end(point, skipped_record(point, SkipReason.INVALID_SNAPSHOT, detail))
            case LostPoint(key=key, directory=directory, reason=reason, detail=detail):
                point = absent_point(key, directory)
                await self._record(skipped_record(point, reason, detail))
            case TrainerSkip():
                await self._trainer_skip(offer)
            case RunEnded():
                self._run_ends.add(offer)
        self._wake.set()

    async def _admit(self, point: EvalPoint) -> None:
        async with self._admission:
            if point.key.kind is Kind.STEP:
                await self._admit_baseline(point.key.run)
            ended = await self._queue_up(point)
        # deleting what they leave behind may take long: nobody else waits for it
        for gone, record in ended:
            await self._end(gone, record)

    async def _admit_baseline(self, run: str) -> None:
        """Put the baseline of a run that has none in front of the first step seen in this life."""
        if self._baseline is None or run in self._baselined:
            return
        self._baselined.add(run)
        point = await asyncio.to_thread(self._baseline, run)
        if self._ledger.index.get(point.key) is None:
            await self._queue_up(point)

    async def _queue_up(self, point: EvalPoint) -> list[tuple[EvalPoint, PointRecord]]:
        """Accept and queue a point; returns what ends instead: itself, or points it replaces."""
        key, snapshot = point.key, point.snapshot
        known = self._ledger.index.get(key)
        if known is None:
            refusal = await self._refusal(snapshot)
            if refusal is not None:
                return [(point, skipped_record(point, *refusal))]
            await self._ledger.append(accepted_record(point))
            log.info("point_accepted", point=str(key), bytes=snapshot.size_bytes)
        elif known.outcome is not None or self.is_open(key):
            return []
        else:
            log.info("point_resumes", point=str(key))
        now = asyncio.get_running_loop().time()
        self._queue[key] = _Entry(point, "queued", now, now, Pulse(str(key)))
        latest = self._config.overflow == "latest" and key.kind is Kind.STEP
        return self._supersede_queued(key.run) if latest else []

    async def _refusal(self, snapshot: Snapshot) -> tuple[SkipReason, str] | None:
        if snapshot.final or snapshot.kind is Kind.BASELINE:
            return None
        shortage = await self._shortage() if snapshot.owned else None
        if shortage is not None:
            return SkipReason.NO_SPACE, shortage
        busy = len(self._queue) + len(self._running)
        if self._config.overflow == "skip" and busy >= self._config.max_in_flight:
            return SkipReason.BUSY, (
                f"{busy} points are in flight and dispatch.overflow is 'skip'; evaluate less "
                "often, or raise dispatch.max_in_flight"
            )
        return None

    def _supersede_queued(self, run: str) -> list[tuple[EvalPoint, PointRecord]]:
        """Policy ``latest``: what queues gives way to the newest snapshot of its run.

        The newest by its marker: snapshots are read side by side and come in any order.
        """
        if len(self._running) < self._config.max_in_flight and not self.paused:
            return []
        queued = {
            key: entry.point.snapshot
            for key, entry in self._queue.items()
            if key.run == run and key.kind is not Kind.BASELINE
        }
        newest = max(queued, key=lambda key: (queued[key].marker_time, key))
        ended = []
        detail = f"{newest} came while this point queued, and dispatch.overflow is 'latest'"
        for key, snapshot in queued.items():
            if key == newest or snapshot.final:
                continue
            point = self._queue.pop(key).point
            ended.append((point, skipped_record(point, SkipReason.SUPERSEDED, detail)))
        return ended

    async def _trainer_skip(self, offer: TrainerSkip) -> None:
        key = offer.key
        async with self._admission:
            if self._ledger.index.revisions(key.run, key.step, key.kind):
                log.info("skip_of_known_step_ignored", point=str(key), reason=offer.reason)
            else:
                point = absent_point(key)
                detail = offer.detail or f"the trainer skipped this step ({offer.reason})"
                await self._record(skipped_record(point, offer.reason, detail))
        await self._retention.consume(offer.path)

    # --- what operators say --------------------------------------------------------------------

    async def abort(
        self, run: str, step: int, why: str, *, queued_only: bool = False
    ) -> list[PointKey]:
        """End every queued or running point of a step as ``skipped`` / ``aborted``.

        Returns their keys. Raises EvaldError when there is none, or one that runs and
        ``queued_only``.
        """
        queued = [key for key in self._queue if (key.run, key.step) == (run, step)]
        running = [
            key
            for key, entry in self._running.items()
            if (key.run, key.step) == (run, step) and not (entry.work and entry.work.done())
        ]
        if queued_only and running:
            raise EvaldError(f"cannot skip step {step} of run {run}: it is running; abort it")
        if not queued and not running:
            raise EvaldError(
                f"cannot end step {step} of run {run}: it is neither queued nor running; "
                "see `evald status`"
            )
        for key in running:
            entry = self._running[key]
            entry.aborted = why
            if entry.work is not None:
                entry.work.cancel()
        # all of them leave the queue before anything else can happen
        for point in [self._queue.pop(key).point for key in queued]:
            await self._end(point, skipped_record(point, SkipReason.ABORTED, why))
        return queued + running

    def is_open(self, key: PointKey) -> bool:
        """Tell whether a point queues or runs, or its end is not settled yet."""
        return key in self._queue or key in self._running or key in self._ending

    def pause(self, *, paused: bool) -> None:
        """Hold back what queues, or let it go on; what runs is not touched."""
        self.paused = paused
        self._wake.set()
        log.info("admission_paused" if paused else "admission_resumed")

    # --- the points ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Start points as there is room; never returns."""
        async with asyncio.TaskGroup() as points:
            while True:
                self._pulse.beat()
                self._start_points(points)
                await self._run_ends.settle()
                if not self._running:
                    self._idle.set()
                self._wake.clear()
                looks = self._run_ends.waiting or self._ledger.pause.why
                try:
                    async with asyncio.timeout(_LOOK_AGAIN_S if looks else _LOOK_ANYWAY_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def drain(self, timeout_s: float) -> None:
        """Start nothing more and wait for what runs, at most ``timeout_s``."""
        self._draining = True
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.info("drain_deadline", running=[str(key) for key in self._running])

    def _start_points(self, points: asyncio.TaskGroup) -> None:
        while (
            self._queue
            and not self._draining
            and not self.paused
            and not self._ledger.pause.why
            and len(self._running) < self._config.max_in_flight
        ):
            key = self._runs.choose(self._queue)
            self._runs.start(key.run)
            entry = self._running[key] = self._queue.pop(key)
            self._idle.clear()
            turn = self._turns.join(key)
            points.create_task(self._live(entry, turn), name=f"point {key}")

    async def _live(self, entry: _Entry, turn: asyncio.Event) -> None:
        point, key = entry.point, entry.point.key
        clock = asyncio.get_running_loop().time
        limit_s = self._config.point_deadline_s + _SLACK_S

        def on_state(state: str) -> None:
            entry.state, entry.since = state, clock()
            entry.pulse.rest(state, math.inf if state == "waiting" else limit_s)
            log.info("point_state", point=str(key), state=state)

        entry.work = asyncio.create_task(
            self._measure.run(
                point,
                queued_s=clock() - entry.accepted,
                turn=turn,
                on_spare=functools.partial(self._turns.share, key),
                on_state=on_state,
                on_set=self._record_set,
            ),
            name=f"measure {key}",
        )
        if entry.aborted:
            entry.work.cancel()
        try:
            record = await entry.work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not entry.aborted or (task is not None and task.cancelling()):
                raise
            record = skipped_record(point, SkipReason.ABORTED, entry.aborted)
        finally:
            self._turns.leave(key)
        on_state("recording")
        await self._end(point, record)
        del self._running[key]
        self._wake.set()

    async def _record_set(self, record: SetRecord) -> None:
        await self._ledger.append(record)
        log.info("set_done", run=record.run, step=record.step, set=record.set)

    async def _end(self, point: EvalPoint, record: PointRecord) -> None:
        """Write the terminal record, then give up the snapshot."""
        self._ending.add(point.key)
        try:
            await self._record(record)
            await self._retention.end(point, record)
        finally:
            self._ending.discard(point.key)

    async def _record(self, record: PointRecord) -> None:
        index = self._ledger.index
        record.void_sets = index.void_sets(record)
        if record.outcome is not Outcome.SKIPPED and record.kind is Kind.STEP:
            newest = index.newest_step(record.run)
            record.metrics["eval/lag_steps"] = max((newest or record.step) - record.step, 0)
        await self._ledger.append(record)
        log.info(
            "point_ended",
            point=record.record_id,
            outcome=str(record.outcome),
            reason=record.reason,
            detail=record.detail,
        )

    # --- status --------------------------------------------------------------------------------

    def pulses(self) -> list[Pulse]:
        """Pulse of the loop, and of each point that runs."""
        return [self._pulse, *(entry.pulse for entry in self._running.values())]

    def view(self) -> tuple[list[PointView], list[PointView]]:
        """Queued and running points, in order."""
        now = asyncio.get_running_loop().time()
        running = [_view(entry, now) for entry in self._running.values()]
        for key, view in zip(self._running, running, strict=True):
            if view.state == "evaluating":
                view.sets = self._progress(key)
        return [_view(entry, now) for entry in self._queue.values()], running


def _view(entry: _Entry, now: float) -> PointView:
    key = entry.point.key
    return PointView(
        run=key.run,
        step=key.step,
        revision=key.revision,
        kind=key.kind,
        state=entry.state,
        since_s=round(now - entry.since, 3),
    )
