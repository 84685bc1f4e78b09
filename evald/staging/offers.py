"""What staging hands to the dispatcher: one plain type for each thing that it can find."""

from __future__ import annotations

from pathlib import Path

import msgspec

from evald.point import EvalPoint, PointKey, SkipReason


class InvalidPoint(msgspec.Struct, frozen=True):
    """A finished snapshot that no engine may see; ``detail`` is one sentence for people."""

    point: EvalPoint
    detail: str


class LostPoint(msgspec.Struct, frozen=True):
    """A known point whose bytes are gone (``ckpt_missing``) or replaced (``superseded``)."""

    key: PointKey
    directory: Path
    detail: str
    reason: SkipReason


class TrainerSkip(msgspec.Struct, frozen=True):
    """A step that gets no snapshot; ``path`` is removed once the record is durable."""

    key: PointKey
    reason: str
    detail: str
    path: Path


class RunEnded(msgspec.Struct, frozen=True):
    """The run is over; every snapshot that was marked before has been offered.

    ``path`` is removed once the record is durable.
    """

    run: str
    last_step: int
    path: Path


Offer = EvalPoint | InvalidPoint | LostPoint | TrainerSkip | RunEnded
