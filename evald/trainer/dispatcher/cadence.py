"""Which step a training loop speaks of, and whether it is due: once for each of them."""

from __future__ import annotations

from collections.abc import Callable

from evald.trainer.dispatcher.collective import Collective
from evald.trainer.dispatcher.schedule import Schedule
from evald.trainer.values import step_number


class Cadence:
    """Follows the loop's calls by a ``schedule``; where the clock decides, rank 0's does."""

    def __init__(
        self, schedule: Schedule, ranks: Collective, monotonic: Callable[[], float]
    ) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._monotonic = monotonic
        self._due_s = monotonic()
        #: the newest step that was spoken of.
        self._step: int | None = None
        #: it was given to evald, or skipped.
        self.is_done = False

    def follow(self, step: int) -> int:
        """Return the step's number, which the loop has come to; raises ValueError for none."""
        step, first = step_number("step", step), self._schedule.first_step
        if step < first:
            raise ValueError(
                f"cannot dispatch step {step}: with first_step={first} no step has that number; "
                "correct first_step, or the number"
            )
        if step != self._step:
            self._step, self.is_done = step, False
        return step

    def end(self, last_step: int) -> None:
        """Let the run end at a step; raises ValueError for one before the newest."""
        if self._step is not None and last_step < self._step:
            raise ValueError(
                f"cannot end the run at step {last_step}: step {self._step} came already; give the "
                "number of the last step"
            )

    def is_due(self, step: int, *, epoch_end: bool) -> bool:
        """Tell whether the step is due; collective where the clock decides."""
        schedule = self._schedule
        if schedule.every_s is None:
            return schedule.is_due(step, epoch_end=epoch_end)
        since_s = self._monotonic() - self._due_s
        due = self._ranks.agree(
            lambda: schedule.is_due(step, epoch_end=epoch_end, since_s=since_s), otherwise=False
        )
        if due:
            self._due_s = self._monotonic()
        return due
