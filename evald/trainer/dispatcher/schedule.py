"""When a step is due: arithmetic on step numbers, without clock, files or weights."""

from __future__ import annotations

from collections.abc import Iterable

from evald.trainer.values import above_zero, whole


class Schedule:
    """Which steps of a run get a point.

    ``first_step`` is the number of the run's first step: 0 or 1. A step is due

    - every ``interval`` steps, so at steps 4, 9, 14, ... for ``interval=5, first_step=0``, and at
      5, 10, 15, ... for ``first_step=1``; or
    - when ``steps`` names it (``()``: at no step by itself); or
    - every ``every_minutes``, by the caller's clock;
    - beside ``interval`` or ``every_minutes``, or alone: every ``epoch_steps`` steps;
    - whenever the caller says that it ends an epoch;
    - when it is the last one of ``num_steps`` (None: not known; whoever knows the end forces it).

    Raises ValueError for arguments that are wrong or contradict each other.
    """

    def __init__(
        self,
        *,
        first_step: int,
        interval: int | None = None,
        steps: Iterable[int] | None = None,
        epoch_steps: int | None = None,
        every_minutes: float | None = None,
        num_steps: int | None = None,
    ) -> None:
        if isinstance(first_step, bool) or first_step not in {0, 1}:
            raise ValueError(
                f"cannot use first_step={first_step!r}: give the number of the run's first step, "
                "0 for `for step in range(n)`, 1 where the first finished step is called 1"
            )
        self.first_step = first_step
        self.interval = None if interval is None else whole("interval", interval, least=1)
        self.epoch_steps = (
            None if epoch_steps is None else whole("epoch_steps", epoch_steps, least=1)
        )
        self.num_steps = None if num_steps is None else whole("num_steps", num_steps, least=0)
        self.every_s: float | None = None
        if every_minutes is not None:
            self.every_s = 60.0 * above_zero("every_minutes", every_minutes, "minutes")
        self.steps = None if steps is None else self._named(steps)
        self._refuse_contradictions()

    @property
    def last_step(self) -> int | None:
        """Number of the last step; one before the first for a run of no steps."""
        return None if self.num_steps is None else self.first_step + self.num_steps - 1

    def is_last(self, step: int) -> bool:
        """Tell whether ``step`` is known to be the last one."""
        return step == self.last_step and step >= self.first_step

    def is_due(self, step: int, *, epoch_end: bool = False, since_s: float = 0.0) -> bool:
        """Tell whether ``step`` gets a point; ``since_s``: seconds since a step was last due."""
        if epoch_end or self.is_last(step):
            return True
        if self.steps is not None:
            return step in self.steps
        if self.every_s is not None and since_s >= self.every_s:
            return True
        done = step + 1 - self.first_step
        return any(done % every == 0 for every in (self.interval, self.epoch_steps) if every)

    def refuse_unsaved(self, save_interval: int) -> None:
        """Raise ValueError where a step is due for which no checkpoint is saved."""
        if self.every_s is not None:
            raise ValueError(
                "cannot reuse checkpoints every_minutes: they are saved at steps; give interval, "
                f"a multiple of save_interval={save_interval}"
            )
        for name, every in (("interval", self.interval), ("epoch_steps", self.epoch_steps)):
            if every is not None and every % save_interval:
                raise ValueError(
                    f"cannot reuse checkpoints with {name}={every}: it is no multiple of "
                    f"save_interval={save_interval}, so some points would have no checkpoint; "
                    f"use {_nearest(every, save_interval)}, or mode='sync'"
                )
        for step in sorted(self.steps or ()):
            if (step + 1 - self.first_step) % save_interval and not self.is_last(step):
                raise ValueError(
                    f"cannot reuse a checkpoint of step {step}: with save_interval={save_interval} "
                    "none is saved there; name steps that are saved, or use mode='sync'"
                )

    def _named(self, steps: Iterable[int]) -> frozenset[int]:
        if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
            raise ValueError(f"cannot use steps={steps!r}: give a list of step numbers")  # noqa: TRY004
        named = frozenset(whole("steps", step, least=0) for step in steps)
        if named and min(named) < self.first_step:
            raise ValueError(
                f"cannot evaluate step {min(named)}: with first_step={self.first_step} no step has "
                "that number; leave it out, or correct first_step"
            )
        last = self.last_step
        if last is not None and named and max(named) > last:
            raise ValueError(
                f"cannot evaluate step {max(named)}: the last of num_steps={self.num_steps} steps "
                f"is {last}; leave it out, or correct num_steps or first_step"
            )
        return named

    def _refuse_contradictions(self) -> None:
        given = {
            "interval": self.interval,
            "steps": self.steps,
            "every_minutes": self.every_s,
            "epoch_steps": self.epoch_steps,
        }
        names = [name for name, value in given.items() if value is not None]
        if not names:
            raise ValueError(
                "cannot tell when a step is due: give interval, steps, every_minutes or "
                "epoch_steps; steps=() evaluates only the last step and the ends of epochs that "
                "you announce"
            )
        alone = [name for name in names if name != "epoch_steps"]
        if len(alone) > 1:
            raise ValueError(
                f"cannot follow {' and '.join(alone)} at the same time: give one of them"
            )
        if self.steps is not None and self.epoch_steps is not None:
            raise ValueError(
                "cannot follow steps and epoch_steps at the same time: a list of steps is "
                "complete; add the ends of epochs to it"
            )


def _nearest(every: int, save_interval: int) -> str:
    """Name the multiples around ``every``, for people."""
    below = every // save_interval * save_interval
    above = below + save_interval
    return f"{below} or {above}" if below else f"{above}"
