"""Admission: what staging offers becomes points, and every point ends in one terminal record."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from evald.config import Dispatch
from evald.evals.evaluator import Evaluator
from evald.measure import Measure, skipped_record
from evald.point import EvalPoint, Kind, Outcome, PointKey, SkipReason, Snapshot
from evald.results.ledger import Ledger
from evald.results.records import Accepted, Alert, PointRecord, RunEnd, SetRecord
from evald.staging.offers import InvalidPoint, LostPoint, Offer, RunEnded, TrainerSkip
from evald.staging.retention import Retention
from evald.status.view import PointView
from evald.text import one_line
from evald.turns import Turns

log = structlog.get_logger(__name__)

#: a run's last step may become visible a moment after ``run.end`` (two scans apart).
_LAST_STEP_WAIT_S = 10.0


class Dispatcher:
    """Queues points in order of arrival and runs at most ``max_in_flight`` of them.

    ``used_bytes`` tells the bytes of all snapshots in the staging root; ``max_bytes`` is their
    budget; ``owned``: evald deletes in it. ``on_run_end`` is called once the run is over and all
    its points have ended; ``baseline`` makes a run's baseline point, which goes before the run's
    first step.
    """

    def __init__(
        self,
        config: Dispatch,
        *,
        ledger: Ledger,
        measure: Measure,
        evaluator: Evaluator,
        retention: Retention,
        used_bytes: Callable[[], int],
        max_bytes: int | None,
        owned: bool,
        on_run_end: Callable[[str], None],
        baseline: Callable[[str], EvalPoint] | None = None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._measure = measure
        self._evaluator = evaluator
        self._retention = retention
        self._used_bytes = used_bytes
        self._max_bytes = max_bytes
        self._owned = owned
        self._on_run_end = on_run_end
        self._baseline = baseline
        self._baselined: set[str] = set()
        self._queue: deque[EvalPoint] = deque()
        self._running: dict[PointKey, PointView] = {}
        self._state_since: dict[PointKey, float] = {}
        self._ending_runs: dict[str, tuple[RunEnded, float]] = {}
        #: what is looked up in the index and what is then appended belong together.
        self._admission = asyncio.Lock()
        self._wake = asyncio.Event()
        self._open = True
        self._idle = asyncio.Event()
        self._turns = Turns()

    # --- what staging offers -------------------------------------------------------------------

    async def offer(self, offer: Offer) -> None:
        """Take in what staging found; returns when it is durable."""
        match offer:
            case EvalPoint():
                await self._admit(offer)
            case InvalidPoint(point=point, detail=detail):
                await self._end(point, skipped_record(point, SkipReason.INVALID_SNAPSHOT, detail))
            case LostPoint(key=key, directory=directory, reason=reason, detail=detail):
                point = EvalPoint(key, _no_snapshot(key, directory))
                await self._record(skipped_record(point, reason, detail))
            case TrainerSkip():
                await self._trainer_skip(offer)
            case RunEnded():
                self._ending_runs[offer.run] = (offer, asyncio.get_running_loop().time())
        self._wake.set()

    async def alert(self, run: str, step: int, name: str, detail: str) -> None:
        """Put something that a person should know into the ledger."""
        record_id = f"{run}/alert/{name}/{self._ledger.last_seq + 1}"
        await self._ledger.append(
            Alert(run=run, step=step, record_id=record_id, name=name, detail=one_line(detail))
        )

    async def _admit(self, point: EvalPoint) -> None:
        async with self._admission:
            if point.snapshot.kind is Kind.STEP:
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
            refusal = self._refusal(snapshot)
            if refusal is not None:
                return [(point, skipped_record(point, *refusal))]
            await self._ledger.append(_accepted(point))
            log.info("point_accepted", point=str(key), bytes=snapshot.size_bytes)
        elif known.outcome is not None or self._is_here(key):
            return []
        else:
            log.info("point_resumes", point=str(key))
        latest = self._config.overflow == "latest" and key.kind is Kind.STEP
        superseded = self._supersede_queued(point) if latest else []
        self._queue.append(point)
        return superseded

    def _is_here(self, key: PointKey) -> bool:
        """Tell whether the point queues or runs: a baseline can be configured and asked for."""
        return key in self._running or any(point.key == key for point in self._queue)

    def _refusal(self, snapshot: Snapshot) -> tuple[SkipReason, str] | None:
        if snapshot.final or snapshot.kind is Kind.BASELINE:
            return None
        used = self._used_bytes()
        if self._max_bytes is not None and snapshot.owned and used > self._max_bytes:
            return SkipReason.NO_SPACE, (
                f"snapshots in the staging root take {used} bytes, over staging.max_bytes = "
                f"{self._max_bytes}; raise it, or lower keep or max_in_flight"
            )
        busy = len(self._queue) + len(self._running)
        if self._config.overflow == "skip" and busy >= self._config.max_in_flight:
            return SkipReason.BUSY, (
                f"{busy} points are in flight and dispatch.overflow is 'skip'; evaluate less "
                "often, or raise dispatch.max_in_flight"
            )
        return None

    def _supersede_queued(self, newer: EvalPoint) -> list[tuple[EvalPoint, PointRecord]]:
        """Policy ``latest``: what still queues gives way to the newest snapshot of its run."""
        ended = []
        for point in list(self._queue) if len(self._running) >= self._config.max_in_flight else []:
            key = point.key
            if key.run != newer.key.run or point.snapshot.final or key.kind is Kind.BASELINE:
                continue
            self._queue.remove(point)
            detail = (
                f"{newer.key} arrived while this point queued and dispatch.overflow is 'latest'"
            )
            ended.append((point, skipped_record(point, SkipReason.SUPERSEDED, detail)))
        return ended

    async def _trainer_skip(self, offer: TrainerSkip) -> None:
        key = offer.key
        async with self._admission:
            if self._ledger.index.revisions(key.run, key.step, key.kind):
                log.info("skip_of_known_step_ignored", point=str(key), reason=offer.reason)
            else:
                point = EvalPoint(key, _no_snapshot(key, Path()))
                detail = offer.detail or f"the trainer skipped this step ({offer.reason})"
                await self._record(skipped_record(point, offer.reason, detail))
        await self._consume(offer.path)

    async def _consume(self, path: Path) -> None:
        """Remove a trainer's file: its record is durable."""
        if not self._owned:
            return
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            # not read again in this life, and known to the ledger in the next one
            log.warning("staging_file_kept", path=str(path), error=error.strerror)

    # --- the points ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Start points as there is room; never returns."""
        async with asyncio.TaskGroup() as points:
            while True:
                while (
                    self._open and self._queue and len(self._running) < self._config.max_in_flight
                ):
                    self._start(self._queue.popleft(), points)
                await self._settle_runs()
                if not self._running:
                    self._idle.set()
                self._wake.clear()
                try:
                    # a run that is ending is looked at again without an event
                    async with asyncio.timeout(1.0 if self._ending_runs else None):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more and wait for what runs; False when time ran out."""
        self._open = False
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _start(self, point: EvalPoint, points: asyncio.TaskGroup) -> None:
        key = point.key
        self._idle.clear()
        self._running[key] = _view(point, "preparing")
        turn = self._turns.join(key)
        points.create_task(self._live(point, turn), name=f"point {key}")

    async def _live(self, point: EvalPoint, turn: asyncio.Event) -> None:
        key = point.key
        clock = asyncio.get_running_loop().time

        def on_state(state: str) -> None:
            self._running[key].state = state
            self._state_since[key] = clock()
            log.info("point_state", point=str(key), state=state)

        try:
            record = await self._measure.run(
                point, turn=turn, on_state=on_state, on_set=self._record_set
            )
            on_state("recording")
        finally:
            self._turns.leave(key)
        await self._end(point, record)
        del self._running[key]
        self._state_since.pop(key, None)
        self._wake.set()

    async def _record_set(self, record: SetRecord) -> None:
        await self._ledger.append(record)
        log.info("set_done", run=record.run, step=record.step, set=record.set)

    async def _end(self, point: EvalPoint, record: PointRecord) -> None:
        """Write the terminal record, then give up the snapshot."""
        await self._record(record)
        if point.snapshot.owned:
            await self._retention.retire(point.snapshot.directory, point.snapshot.fingerprint)

    async def _record(self, record: PointRecord) -> None:
        newest = self._ledger.index.newest_step(record.run)
        if record.kind is Kind.STEP and record.outcome is not Outcome.SKIPPED:
            lag = max((newest if newest is not None else record.step) - record.step, 0)
            record.metrics["eval/lag_steps"] = lag
        await self._ledger.append(record)
        log.info(
            "point_ended",
            point=record.record_id,
            outcome=str(record.outcome),
            reason=record.reason,
            detail=record.detail,
        )

    async def _settle_runs(self) -> None:
        """Report runs that the trainer ended and that have no open point left."""
        now = asyncio.get_running_loop().time()
        for run, (end, seen_at) in list(self._ending_runs.items()):
            index = self._ledger.index
            if any(p.key.run == run for p in index.open_points()):
                continue
            newest = index.newest_step(run)
            missing = newest is None or newest < end.last_step
            if missing and now - seen_at < _LAST_STEP_WAIT_S:
                continue
            if not index.run_ended(run):
                counts = index.outcome_counts()
                await self._ledger.append(
                    RunEnd(run=run, step=end.last_step, record_id=f"{run}/run_end", points=counts)
                )
            await self._consume(end.path)
            del self._ending_runs[run]
            log.info("run_ended", run=run, last_step=end.last_step)
            self._on_run_end(run)

    # --- status --------------------------------------------------------------------------------

    def view(self) -> tuple[list[PointView], list[PointView]]:
        """Queued and running points, in order."""
        now = asyncio.get_running_loop().time()
        for key, view in self._running.items():
            view.since_s = round(now - self._state_since.get(key, now), 3)
            view.sets = self._evaluator.view() if view.state == "evaluating" else []
        return [_view(p, "queued") for p in self._queue], list(self._running.values())


def _view(point: EvalPoint, state: str) -> PointView:
    key = point.key
    return PointView(
        run=key.run, step=key.step, revision=key.revision, kind=key.kind, state=state, since_s=0.0
    )


def _accepted(point: EvalPoint) -> Accepted:
    key, snapshot = point.key, point.snapshot
    return Accepted(
        run=key.run,
        step=key.step,
        revision=key.revision,
        record_id=f"{key.record_id}/accepted",
        kind=key.kind,
        directory=str(snapshot.directory),
        size_bytes=snapshot.size_bytes,
        fingerprint=snapshot.fingerprint,
        digest=snapshot.digest,
        final=snapshot.final,
        owned=snapshot.owned,
    )


def _no_snapshot(key: PointKey, directory: Path) -> Snapshot:
    """Stand in for a snapshot whose bytes never were, or are no longer, there."""
    return Snapshot(
        run=key.run,
        step=key.step,
        kind=key.kind,
        directory=directory,
        fingerprint="",
        size_bytes=0,
        owned=False,
    )
