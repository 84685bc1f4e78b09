"""What a dispatcher was told, checked once: what is wrong or contradicts itself is a ValueError."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from evald.trainer.dispatcher.schedule import Schedule, whole

_STEP = "{step}"
#: run ids become path components and parts of metric names.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an ``EvalDispatcher``, as it documents them."""

    root: Path
    base_dir: str | os.PathLike[str] | None
    run: str | None
    schedule: Schedule
    baseline: bool
    baseline_step: int
    baseline_path: Path | None
    overflow: Literal["skip", "backpressure"]
    max_in_flight: int | None
    backpressure_timeout_s: float
    dead_after_s: float
    mode: Literal["sync", "async", "reuse"]
    checkpoint_path: str | None
    pattern: str
    marker: str
    #: the staging root is another host's.
    far: bool

    @property
    def base_folder(self) -> Path | None:
        """The base model's directory; None for a hub id."""
        if self.base_dir is None or not Path(self.base_dir).is_dir():
            return None
        return Path(self.base_dir).absolute()

    @property
    def baseline_model(self) -> Path | None:
        """The baseline's directory as the daemon sees it; None: its own base model."""
        if self.far or self.baseline_path is not None:
            return self.baseline_path
        folder = self.base_folder
        has_weights = folder is not None and any(folder.glob("*.safetensors"))
        return folder if has_weights else None


def check_arguments(
    schedule: Schedule,
    *,
    root: str | os.PathLike[str],
    base_dir: str | os.PathLike[str] | None,
    run: str | None,
    baseline: bool,
    baseline_step: int | None,
    baseline_path: str | os.PathLike[str] | None,
    overflow: Any,
    max_in_flight: int | None,
    backpressure_timeout_s: float,
    dead_after_s: float,
    mode: Any,
    save_interval: int | None,
    checkpoint_path: str | None,
    pattern: str,
    marker: str,
    results: object,
    url: str | None,
    token: object,
    destination: str | None,
    exporter: object,
    link: object,
    carrier: object,
) -> Arguments:
    """Return the checked arguments; raises ValueError with the remedy."""
    _one_of("overflow", overflow, ("skip", "backpressure"))
    _one_of("mode", mode, ("sync", "async", "reuse"))
    if _STEP not in pattern:
        raise ValueError(f'cannot name snapshots: pattern={pattern!r} lacks "{_STEP}"; put it in')
    if run is not None and not _RUN_NAME.fullmatch(run):
        raise ValueError(
            f"cannot use run={run!r}: it becomes a part of file and metric names; use letters, "
            "digits and . _ @ + -, the first a letter or digit, at most 128"
        )
    if max_in_flight is not None:
        max_in_flight = whole("max_in_flight", max_in_flight, least=1)
    _seconds("backpressure_timeout_s", backpressure_timeout_s)
    _seconds("dead_after_s", dead_after_s)
    if mode == "reuse":
        _check_reuse(schedule, save_interval, checkpoint_path)
    else:
        _check_export(save_interval, checkpoint_path, base_dir, exporter)
    _check_ways(results, url, token, destination, link, carrier)
    far = destination is not None or carrier is not None or url is not None
    return Arguments(
        root=Path(root).absolute(),
        base_dir=base_dir,
        run=run,
        schedule=schedule,
        baseline=baseline,
        baseline_step=_baseline_step(schedule, baseline_step, baseline=baseline),
        baseline_path=_baseline_path(baseline_path, far=far),
        overflow=overflow,
        max_in_flight=max_in_flight,
        backpressure_timeout_s=backpressure_timeout_s,
        dead_after_s=dead_after_s,
        mode=mode,
        checkpoint_path=checkpoint_path,
        pattern=pattern,
        marker=marker,
        far=far,
    )


def _baseline_step(schedule: Schedule, given: int | None, *, baseline: bool) -> int:
    step = schedule.first_step - 1 if given is None else whole("baseline_step", given, least=-999)
    if baseline and step >= schedule.first_step:
        raise ValueError(
            f"cannot draw the baseline at baseline_step={step}: with first_step="
            f"{schedule.first_step} that is a training step's place; use "
            f"{schedule.first_step - 1}, or baseline=False"
        )
    return step


def _baseline_path(given: str | os.PathLike[str] | None, *, far: bool) -> Path | None:
    if given is None:
        return None
    return Path(given) if far else Path(given).absolute()


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


def _check_export(
    save_interval: int | None, checkpoint_path: str | None, base_dir: object, exporter: object
) -> None:
    if save_interval is not None or checkpoint_path is not None:
        raise ValueError(
            "cannot use save_interval or checkpoint_path when snapshots are exported: use "
            "mode='reuse', or leave them out"
        )
    if base_dir is None and exporter is None:
        raise ValueError(
            "cannot export snapshots without base_dir: give the base model's directory, which has "
            "their tokenizer and config; or use mode='reuse'"
        )


def _check_ways(
    results: object,
    url: str | None,
    token: object,
    destination: str | None,
    link: object,
    carrier: object,
) -> None:
    ways = [
        name
        for name, value in (("results", results), ("url", url), ("link", link))
        if value is not None
    ]
    if len(ways) > 1:
        raise ValueError(f"cannot ask evald by {' and '.join(ways)} at once: give one of them")
    if token is not None and url is None:
        raise ValueError("cannot use a token without url: it is for the daemon's HTTP API")
    if destination is not None and carrier is not None:
        raise ValueError("cannot use destination and carrier at once: give one of them")
    beyond = carrier is not None or (destination is not None and is_far(destination))
    if beyond and url is None and link is None:
        raise ValueError(
            "cannot know what becomes of snapshots on another host: give url, the daemon's HTTP "
            "API, and its token"
        )


def is_far(destination: str) -> bool:
    """Tell whether a destination names a host; else it is a directory that is seen from here."""
    return ":" in destination.partition("/")[0]


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"cannot use {name}={value!r}: give {' or '.join(map(repr, allowed))}")


def _seconds(name: str, value: Any) -> None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value <= 0:
        raise ValueError(f"cannot use {name}={value!r}: give seconds, above 0")
