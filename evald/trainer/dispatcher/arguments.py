"""What a dispatcher was told, checked once: what is wrong or contradicts itself is a ValueError."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from evald.trainer.dispatcher.schedule import Schedule
from evald.trainer.values import AnyPath, above_zero, one_of, whole

_STEP = "{step}"
#: run ids become path components and parts of metric names.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an ``EvalDispatcher``, as it documents them.

    Raises ValueError, with the remedy, for what is wrong or contradicts itself.
    """

    root: Path
    base_dir: AnyPath | None
    run: str | None
    schedule: Schedule
    baseline: bool
    baseline_step: int | None
    baseline_path: Path | None
    overflow: Literal["skip", "backpressure"]
    max_in_flight: int | None
    backpressure_timeout_s: float
    dead_after_s: float
    mode: Literal["sync", "async", "reuse"]
    save_interval: int | None
    checkpoint_path: str | None
    pattern: str
    marker: str
    #: the staging root is another host's.
    far: bool
    #: the caller has an exporter.
    has_exporter: bool

    def __post_init__(self) -> None:
        """Check them."""
        one_of("overflow", self.overflow, ("skip", "backpressure"))
        one_of("mode", self.mode, ("sync", "async", "reuse"))
        if _STEP not in self.pattern:
            raise ValueError(
                f'cannot name snapshots: pattern={self.pattern!r} lacks "{_STEP}"; put it in'
            )
        if self.run is not None and not _RUN_NAME.fullmatch(self.run):
            raise ValueError(
                f"cannot use run={self.run!r}: it becomes a part of file and metric names; use "
                "letters, digits and . _ @ + -, the first a letter or digit, at most 128"
            )
        if self.max_in_flight is not None:
            whole("max_in_flight", self.max_in_flight, least=1)
        above_zero("backpressure_timeout_s", self.backpressure_timeout_s, "seconds")
        above_zero("dead_after_s", self.dead_after_s, "seconds")
        if self.mode == "reuse":
            _check_reuse(self.schedule, self.save_interval, self.checkpoint_path)
        else:
            self._check_export()
        first, point = self.schedule.first_step, self.baseline_point
        if self.baseline and point >= first:
            raise ValueError(
                f"cannot draw the baseline at baseline_step={point}: with first_step={first} that "
                f"is a training step's place; use {first - 1}, or baseline=False"
            )

    @property
    def baseline_point(self) -> int:
        """The step at which the baseline is drawn."""
        if self.baseline_step is None:
            return self.schedule.first_step - 1
        return whole("baseline_step", self.baseline_step, least=-999)

    @property
    def base_folder(self) -> Path | None:
        """The base model's directory; None for a hub id."""
        if self.base_dir is None or not Path(self.base_dir).is_dir():
            return None
        return Path(self.base_dir).absolute()

    def refuse_missing_base(self) -> None:
        """Raise ValueError for a base directory that is not here; for rank 0, which reads it."""
        if self.base_dir is not None and Path(self.base_dir).is_absolute() and not self.base_folder:
            raise ValueError(
                f"cannot use base_dir={os.fspath(self.base_dir)!r}: there is no such directory on "
                "this host; give the base model's directory, or its hub id"
            )

    @property
    def baseline_model(self) -> Path | None:
        """The baseline's directory as the daemon sees it; None: its own base model."""
        if self.far or self.baseline_path is not None:
            return self.baseline_path
        folder = self.base_folder
        has_weights = folder is not None and any(folder.glob("*.safetensors"))
        return folder if has_weights else None

    def _check_export(self) -> None:
        if self.save_interval is not None or self.checkpoint_path is not None:
            raise ValueError(
                "cannot use save_interval or checkpoint_path when snapshots are exported: use "
                "mode='reuse', or leave them out"
            )
        if self.base_dir is None and not self.has_exporter:
            raise ValueError(
                "cannot export snapshots without base_dir: give the base model's directory, which "
                "has their tokenizer and config; or use mode='reuse'"
            )


def _check_reuse(
    schedule: Schedule, save_interval: int | None, checkpoint_path: str | None
) -> None:
    if checkpoint_path is None or _STEP not in checkpoint_path:
        raise ValueError(
            f"cannot find checkpoints to reuse with checkpoint_path={checkpoint_path!r}: give "
            f'where the trainer saves them, such as "/checkpoints/step_{_STEP}"'
        )
    if save_interval is None:
        raise ValueError(
            "cannot reuse checkpoints without save_interval: give the number of steps between two "
            "that the trainer saves"
        )
    schedule.refuse_unsaved(whole("save_interval", save_interval, least=1))
