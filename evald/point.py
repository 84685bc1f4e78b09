"""The plain types that flow through the rooms: what a point is and how it may end."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

#: fingerprint of a point on shared engines: this, and the weight version that they must have.
SHARED = "shared:"


class Outcome(enum.StrEnum):
    """How a point ended."""

    OK = "ok"
    PARTIAL = "partial"
    SKIPPED = "skipped"


class SkipReason(enum.StrEnum):
    """Reasons that evald itself gives; a black box may raise others."""

    BUSY = "busy"
    EXPORT_FAILED = "export_failed"
    NO_SPACE = "no_space"
    CKPT_MISSING = "ckpt_missing"
    INVALID_SNAPSHOT = "invalid_snapshot"
    UNHEALTHY = "unhealthy"
    PIN_VIOLATION = "pin_violation"
    SUPERSEDED = "superseded"
    DEADLINE = "deadline"
    VERSION_CHANGED = "version_changed"
    SET_CHANGED = "set_changed"
    ABORTED = "aborted"
    CRASHED = "crashed"


class Kind(enum.StrEnum):
    """What a point measures: a training step, or the model before the first one."""

    STEP = "step"
    BASELINE = "baseline"


class PointKey(msgspec.Struct, frozen=True, order=True):
    """One (run, step, revision) to be measured; it ends in exactly one terminal record."""

    run: str
    step: int
    revision: int = 0
    kind: Kind = Kind.STEP

    @property
    def record_id(self) -> str:
        """Stable id of the terminal record: the same after a replay."""
        return f"{self.run}/{self.kind}/{self.step}/r{self.revision}"

    def __str__(self) -> str:
        """Show the key as logs do."""
        return f"{self.run}:{self.kind}:{self.step}.r{self.revision}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A finished checkpoint directory, as staging found it.

    ``fingerprint`` is a cheap hash over names, sizes, inodes and modification times: it tells
    whether a directory is still the one that was seen. ``digest`` (hex, xxh3-128) is the hash over
    names, sizes and content; ``None`` until the content has been read.
    """

    run: str
    step: int
    directory: Path
    fingerprint: str
    size_bytes: int
    kind: Kind = Kind.STEP
    digest: str | None = None
    final: bool = False
    #: evald may delete the directory once the point has ended.
    owned: bool = True
    #: seconds, from the manifest; what the export cost the trainer.
    export_s: float | None = None
    stall_s: float | None = None
    #: seconds that its validation took, an inline digest included.
    validate_s: float = 0.0
    #: the version that shared engines must have; None: the weights are in the directory.
    weight_version: str | None = None
    #: ``time.time()`` of the marker.
    marker_time: float = 0.0


class EvalPoint(msgspec.Struct, frozen=True):
    """A point on its way through the daemon."""

    key: PointKey
    snapshot: Snapshot


def absent_point(key: PointKey, directory: Path = Path()) -> EvalPoint:
    """Return a point whose bytes never were, or are no longer, there."""
    snapshot = Snapshot(
        run=key.run,
        step=key.step,
        kind=key.kind,
        directory=directory,
        fingerprint="",
        size_bytes=0,
        owned=False,
    )
    return EvalPoint(key, snapshot)


class PinTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that a point must be measured on."""

    run: str
    step: int
    digest: str
    #: None: nothing to load (shared engines).
    directory: Path | None
    #: the version that engines must already have, where evald does not load; else None.
    weight_version: str | None = None


class Timings(msgspec.Struct, kw_only=True):
    """Seconds that each stage of a point took (monotonic clock)."""

    validate_s: float = 0.0
    queued_s: float = 0.0
    prepare_s: float = 0.0
    pin_s: float = 0.0
    evaluate_s: float = 0.0
    total_s: float = 0.0
