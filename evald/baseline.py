"""The baseline: the base model's own directory as a point, once for each run."""

from __future__ import annotations

from pathlib import Path

from evald.errors import SnapshotGone
from evald.point import EvalPoint, Kind, PointKey, Snapshot
from evald.staging.digest import fingerprint


def baseline_point(run: str, step: int, model_dir: Path, marker: str) -> EvalPoint:
    """Build the baseline point of ``run``; its directory is read and never deleted."""
    try:
        seen, size_bytes = fingerprint(model_dir, marker)
    except (FileNotFoundError, SnapshotGone):
        seen, size_bytes = "", 0  # the point ends with that reason when it is prepared
    snapshot = Snapshot(
        run=run,
        step=step,
        kind=Kind.BASELINE,
        directory=model_dir,
        fingerprint=seen,
        size_bytes=size_bytes,
        owned=False,
    )
    return EvalPoint(PointKey(run, step, 0, Kind.BASELINE), snapshot)
