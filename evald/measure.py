"""One point's life between acceptance and its terminal record: prepare, pin, prove, evaluate."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from evald import __version__
from evald.config import Dispatch
from evald.errors import EvalSkip, SnapshotGone, Superseded, Unhealthy
from evald.evals.evaluator import Evaluator, PointResult, PreparedPoint, SetResult
from evald.point import EvalPoint, Outcome, SkipReason, Timings
from evald.postures.contract import Pin, PinTarget, Posture
from evald.results.records import Counts, PointRecord, SetRecord
from evald.staging.digest import content_digest, fingerprint
from evald.text import one_line

#: share of samples cut by a deadline above which what is left is no measurement.
_MAX_TIMEOUT_SHARE = 0.5
#: within that the engines' own task has ended the daemon.
_STOP_COMES_S = 10.0


class Measure:
    """Measures points: engines and eval sets behind one call.

    ``marker`` is the marker's name, part of what makes a directory "unchanged".
    """

    def __init__(
        self, config: Dispatch, *, posture: Posture, evaluator: Evaluator, marker: str
    ) -> None:
        self._config = config
        self._posture = posture
        self._evaluator = evaluator
        self._marker = marker
        self._stop_hashing = threading.Event()

    def close(self) -> None:
        """Give up digests that nobody waits for any more: a stop would wait for their threads."""
        self._stop_hashing.set()

    async def run(
        self,
        point: EvalPoint,
        *,
        turn: asyncio.Event,
        on_state: Callable[[str], None],
        on_set: Callable[[SetRecord], Awaitable[None]],
    ) -> PointRecord:
        """Measure ``point``; every EvalSkip becomes a ``skipped`` record.

        ``turn`` is set when every earlier point is through with the engines. ``on_set`` is awaited
        with the record of each eval set as soon as the set is done. Cancellation passes through:
        the point then has no record and resumes later.
        """
        life = _Life(point)

        async def set_done(result: SetResult) -> None:
            record = _set_record(point, result)
            life.set_ids.append(record.record_id)
            await on_set(record)

        try:
            on_state("preparing")
            prepared, digest = await self._prepare(point)
            life.stamp("prepare_s")
            on_state("waiting")
            await turn.wait()
            life.stamp("queued_s")
            on_state("pinning")
            pin = await self._pin(point, digest)
            life.stamp("pin_s")
            try:
                on_state("evaluating")
                deadline = asyncio.get_running_loop().time() + self._config.point_deadline_s
                result = await self._evaluator.evaluate(
                    prepared, pin, self._posture, on_set=set_done, deadline=deadline
                )
            finally:
                await self._posture.unpin(pin)
            life.stamp("evaluate_s")
            return self._judge(life, digest, pin, result)
        except EvalSkip as skip:
            if self._is_stopping(skip):
                await asyncio.sleep(_STOP_COMES_S)
            return skipped_record(point, skip.reason, skip.detail, life=life)

    def _is_stopping(self, skip: EvalSkip) -> bool:
        """Tell whether no engine is left, which stops the daemon: the point resumes later."""
        engines = self._posture.engines()
        lost = bool(engines) and all(engine.state == "quarantined" for engine in engines)
        return isinstance(skip, Unhealthy) and lost

    async def _prepare(self, point: EvalPoint) -> tuple[PreparedPoint, str]:
        """Tokenize and hash while an earlier point still has the engines."""
        snapshot = point.snapshot
        await asyncio.to_thread(self._check_unchanged, point)
        prepared = await self._evaluator.prepare(point)
        digest = snapshot.digest
        if digest is None:
            try:
                digest = await asyncio.to_thread(
                    content_digest, snapshot.directory, self._marker, stop=self._stop_hashing
                )
            except FileNotFoundError as error:
                raise _gone(snapshot.directory) from error
        return prepared, digest

    async def _pin(self, point: EvalPoint, digest: str) -> Pin:
        """Pin, and check on both sides of the load that the bytes are those of ``digest``."""
        snapshot = point.snapshot
        await asyncio.to_thread(self._check_unchanged, point)
        target = PinTarget(
            run=point.key.run, step=point.key.step, digest=digest, directory=snapshot.directory
        )
        pin = await self._posture.pin(target)
        try:
            # a directory that vanished after the load was deleted, not rewritten
            if await asyncio.to_thread(os.path.isdir, snapshot.directory):
                await asyncio.to_thread(self._check_unchanged, point)
        except EvalSkip:
            await self._posture.unpin(pin)
            raise
        return pin

    def _check_unchanged(self, point: EvalPoint) -> None:
        directory = point.snapshot.directory
        try:
            seen, _ = fingerprint(directory, self._marker)
        except FileNotFoundError as error:
            raise _gone(directory) from error
        if seen != point.snapshot.fingerprint:
            raise Superseded(
                f"{directory} was rewritten after it had been accepted, so its weights are no "
                f"longer those of {point.key}; the new bytes are a point of their own"
            )

    def _judge(self, life: _Life, digest: str, pin: Pin, result: PointResult) -> PointRecord:
        counts = result.counts
        failed = counts.n_error + counts.n_grader_error + counts.n_timeout
        total = max(counts.n_total, 1)
        summary = (
            f"{failed} of {counts.n_total} samples have no score: {counts.n_error} failed, "
            f"{counts.n_timeout} timed out, {counts.n_grader_error} could not be graded"
        )
        provenance = {
            **result.provenance,
            "snapshot": digest,
            "sglang": pin.sglang_version,
            "evald": __version__,
        }
        if counts.n_timeout / total > _MAX_TIMEOUT_SHARE or counts.n_scored == 0:
            late = counts.n_timeout >= max(counts.n_error, counts.n_grader_error)
            reason = SkipReason.DEADLINE if late else SkipReason.CRASHED
            record = skipped_record(life.point, reason, summary, life=life)
            return msgspec.structs.replace(
                record, counts=counts, provenance=provenance, digest=digest
            )
        partial = failed / total > self._config.max_error_share
        timings = life.finish()
        key, snapshot = life.point.key, life.point.snapshot
        metrics = dict(result.metrics)
        metrics["eval/step"] = key.step
        metrics["eval/duration_seconds"] = timings.total_s
        if snapshot.export_s is not None:
            metrics["eval/export_time_seconds"] = snapshot.export_s
        return PointRecord(
            run=key.run,
            step=key.step,
            revision=key.revision,
            record_id=key.record_id,
            kind=key.kind,
            outcome=Outcome.PARTIAL if partial else Outcome.OK,
            detail=summary if failed else "",
            counts=counts,
            timings=timings,
            engines=result.engines,
            weight_versions=result.weight_versions,
            provenance=provenance,
            metrics=metrics,
            directory=str(snapshot.directory),
            fingerprint=snapshot.fingerprint,
            digest=digest,
        )


class _Life:
    """Stage times and set records of one point."""

    def __init__(self, point: EvalPoint) -> None:
        self.point = point
        self.set_ids: list[str] = []
        self._started = self._mark = time.monotonic()
        self._timings = Timings(validate_s=point.snapshot.validate_s)

    def stamp(self, stage: str) -> None:
        """Book the time since the last stamp under ``stage``."""
        now = time.monotonic()
        setattr(self._timings, stage, now - self._mark)
        self._mark = now

    def finish(self) -> Timings:
        """Return the stage times with the total."""
        self._timings.total_s = time.monotonic() - self._started
        return self._timings


def skipped_record(
    point: EvalPoint, reason: str, detail: str, *, life: _Life | None = None
) -> PointRecord:
    """Build the terminal record of a point that has no score."""
    key, snapshot = point.key, point.snapshot
    return PointRecord(
        run=key.run,
        step=key.step,
        revision=key.revision,
        record_id=key.record_id,
        kind=key.kind,
        outcome=Outcome.SKIPPED,
        reason=str(reason),
        detail=one_line(detail),
        timings=life.finish() if life else Timings(validate_s=snapshot.validate_s),
        metrics={"eval/step": key.step, f"eval/skipped_{reason}": 1},
        void_sets=life.set_ids if life else [],
        directory=str(snapshot.directory),
        fingerprint=snapshot.fingerprint,
        digest=snapshot.digest,
    )


def _set_record(point: EvalPoint, result: SetResult) -> SetRecord:
    key = point.key
    return SetRecord(
        run=key.run,
        step=key.step,
        revision=key.revision,
        record_id=f"{key.record_id}/{result.name}",
        kind=key.kind,
        set=result.name,
        counts=msgspec.structs.replace(result.counts) if result.counts else Counts(),
        seconds=result.seconds,
        metrics={**result.metrics, "eval/step": key.step},
    )


def _gone(directory: Path) -> SnapshotGone:
    return SnapshotGone(
        f"cannot read snapshot {directory}: it vanished before it was pinned; "
        "only evald may delete in an owned root"
    )
