"""The records that a point begins and ends with: what came back is a measurement, or a skip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evald import __version__
from evald.config import Dispatch
from evald.point import EvalPoint, Outcome, SkipReason, Timings
from evald.postures.contract import PointResult, SetResult
from evald.results.records import Accepted, Counts, PointRecord
from evald.text import one_line

#: a share of samples that should be a whole number may be a little more.
_ROUNDING = 1e-9


def accepted_record(point: EvalPoint) -> Accepted:
    """Build the record that a point is known."""
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


def judge(
    point: EvalPoint,
    result: PointResult,
    *,
    digest: str | None,
    timings: Timings,
    sets: Sequence[SetResult],
    limits: Dispatch,
) -> PointRecord:
    """Build the terminal record of a point whose ``sets`` are done: ok, partial or skipped."""
    counts = result.counts
    failed = counts.n_error + counts.n_grader_error + counts.n_timeout
    summary = (
        f"{failed} of {counts.n_total} samples have no score: {counts.n_error} failed, "
        f"{counts.n_timeout} timed out, {counts.n_grader_error} could not be graded"
    )
    if result.problem:
        summary += f"; the first: {result.problem}"
    provenance = {**result.provenance, "snapshot": digest, "evald": __version__}
    n_in_time = counts.n_total - counts.n_timeout
    timed_out = n_in_time < limits.min_done_share * counts.n_total - _ROUNDING
    if timed_out or (failed and counts.n_scored == 0):
        late = counts.n_timeout >= max(counts.n_error, counts.n_grader_error)
        reason = SkipReason.DEADLINE if late else SkipReason.CRASHED
        record = skipped_record(point, reason, summary, timings=timings, digest=digest)
        record.counts, record.provenance = counts, provenance
        return record
    too_few = [one.name for one in sets if one.too_few]
    if too_few:
        summary += f"; fewer than min_eval_samples: {', '.join(too_few)}"
    # the worst set decides: a set that failed must not hide behind a large one
    worst_share = max((_error_share(one.counts) for one in sets), default=0.0)
    partial = worst_share > limits.max_error_share or bool(too_few) or counts.n_cut > 0
    key, snapshot = point.key, point.snapshot
    metrics = dict(result.metrics)
    metrics["eval/step"] = key.step
    metrics["eval/duration_seconds"] = timings.total_s - timings.queued_s
    if snapshot.export_s is not None:
        metrics["eval/export_time_seconds"] = snapshot.export_s
    return PointRecord(
        run=key.run,
        step=key.step,
        revision=key.revision,
        record_id=key.record_id,
        kind=key.kind,
        outcome=Outcome.PARTIAL if partial else Outcome.OK,
        detail=one_line(summary) if failed else "",
        counts=counts,
        timings=timings,
        engines=result.engines,
        weight_versions=result.weight_versions,
        provenance=provenance,
        metrics=metrics,
        curve_breaks=result.curve_breaks,
        directory=str(snapshot.directory),
        fingerprint=snapshot.fingerprint,
        digest=digest,
    )


def skipped_record(
    point: EvalPoint,
    reason: str,
    detail: str,
    *,
    timings: Timings | None = None,
    digest: str | None = None,
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
        timings=timings or Timings(validate_s=snapshot.validate_s),
        metrics={"eval/step": key.step, f"eval/skipped_{reason}": 1},
        # a step that the trainer skipped never had one
        directory="" if snapshot.directory == Path() else str(snapshot.directory),
        fingerprint=snapshot.fingerprint,
        digest=digest or snapshot.digest,
    )


def _error_share(counts: Counts) -> float:
    return 1 - counts.n_scored / counts.n_total if counts.n_total else 0.0
