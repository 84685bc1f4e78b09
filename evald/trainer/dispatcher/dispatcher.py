"""Give evald its points from inside a training loop, without holding the loop up or ending it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from evald.point import SkipReason
from evald.trainer.contract import Alone, Carrier, Link, Ranks
from evald.trainer.dispatcher.aftermath import Aftermath
from evald.trainer.dispatcher.arguments import check_arguments
from evald.trainer.dispatcher.assembly import Exporter, Parts, Ways, build_parts
from evald.trainer.dispatcher.collective import guarded
from evald.trainer.dispatcher.outcomes import Dispatched, Drained
from evald.trainer.dispatcher.schedule import Schedule
from evald.trainer.shared import step_number

__all__ = ["Dispatched", "Drained", "EvalDispatcher"]


class EvalDispatcher(Aftermath):
    """Publishes snapshots when they are due, and tells what became of them.

    Call it from every rank, in the same order; rank 0 decides, and only rank 0 touches files,
    network and clock. Whatever fails (an export, the disk, the daemon, the network) becomes a skip
    of its step with a reason; nothing but wrong arguments raises. One thread at a time.

    When (see ``Schedule``):
        ``first_step``: number of the run's first step, 0 or 1. ``interval``, ``steps``,
        ``every_minutes``, ``epoch_steps``: when a step is due. ``num_steps``: steps of the run, so
        that its last is known; without it, ``finish`` forces the last one. ``every_minutes`` goes
        by rank 0's clock: several ranks then exchange one value at each step. ``baseline``: the
        base model is a point, too, at ``baseline_step`` (None: one before ``first_step``).
        ``dry_run``: for replays; says what would be due, and does nothing.

    What:
        ``mode``: ``"sync"`` and ``"async"`` export weights (``base_dir``: the base model, whose
        tokenizer and config the snapshots get; ``export_options``: further arguments of
        ``SnapshotExporter``); ``"reuse"`` points evald at checkpoints that the trainer saves every
        ``save_interval`` steps at ``checkpoint_path`` (with ``{step}``), which are never deleted.
        ``baseline_path``: the model of the baseline, as the daemon sees it (None: ``base_dir``
        where it has weights and is on the daemon's host, else the daemon's own).

    How many:
        At most ``max_in_flight`` points have no record (None: the daemon's own ``max_in_flight``);
        what an earlier life of the run left behind counts. At the cap, ``overflow="skip"`` skips
        the step ``busy`` before it touches the weights; ``"backpressure"`` waits for the oldest,
        at most ``backpressure_timeout_s``, and then skips. The last step is never skipped ``busy``.
        A daemon that is not there, or whose beat stands still, is looked out for once for
        ``dead_after_s`` and then waited for no more; as it may come back, points are published up
        to the cap (and as long as there is room), and from there on skipped ``unhealthy``.

    Where:
        ``root``: the staging root, or a run's folder in it. ``run``: the run id (None: the
        daemon's). ``pattern``, ``marker``: as in the daemon's config. ``results``: the ledger, on a
        file system that both see (None: where the status in ``root`` says), or ``url``: the
        daemon's HTTP API, with ``token`` or ``token_file``. ``destination``: the staging root of
        another host, ``host:/dev/shm/evald`` or a directory; ``root`` is then a local spool, which
        a thread brings there and empties. ``after_seq``: ``poll`` begins after this record (None:
        with what comes from now on).

    ``ranks``, ``exporter``, ``link``, ``carrier`` replace the parts that are built otherwise; they
    are the caller's to close. With torch.distributed, build this after ``init_process_group``, on
    every rank. Raises ValueError for wrong or contradicting arguments, EvaldError where a token
    cannot be read or rsync is missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        first_step: Literal[0, 1],
        base_dir: str | os.PathLike[str] | None = None,
        run: str | None = None,
        interval: int | None = None,
        steps: Iterable[int] | None = None,
        epoch_steps: int | None = None,
        every_minutes: float | None = None,
        num_steps: int | None = None,
        baseline: bool = True,
        baseline_step: int | None = None,
        baseline_path: str | os.PathLike[str] | None = None,
        overflow: Literal["skip", "backpressure"] = "skip",
        max_in_flight: int | None = None,
        backpressure_timeout_s: float = 600.0,
        dead_after_s: float = 10.0,
        mode: Literal["sync", "async", "reuse"] = "sync",
        save_interval: int | None = None,
        checkpoint_path: str | None = None,
        export_options: Mapping[str, Any] | None = None,
        pattern: str = "step_{step}",
        marker: str = ".complete",
        results: str | os.PathLike[str] | None = None,
        url: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        destination: str | None = None,
        after_seq: int | None = None,
        dry_run: bool = False,
        ranks: Ranks | None = None,
        exporter: Exporter | None = None,
        link: Link | None = None,
        carrier: Carrier | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._schedule = Schedule(
            first_step=first_step,
            interval=interval,
            steps=steps,
            epoch_steps=epoch_steps,
            every_minutes=every_minutes,
            num_steps=num_steps,
        )
        arguments = check_arguments(
            self._schedule,
            root=root,
            base_dir=base_dir,
            run=run,
            baseline=baseline,
            baseline_step=baseline_step,
            baseline_path=baseline_path,
            overflow=overflow,
            max_in_flight=max_in_flight,
            backpressure_timeout_s=backpressure_timeout_s,
            dead_after_s=dead_after_s,
            mode=mode,
            save_interval=save_interval,
            checkpoint_path=checkpoint_path,
            pattern=pattern,
            marker=marker,
            results=results,
            url=url,
            token=token if token is not None else token_file,
            destination=destination,
            exporter=exporter,
            link=link,
            carrier=carrier,
        )
        self._dry_run = dry_run
        parts = Parts(Alone(), None)
        if not dry_run:
            parts = build_parts(
                arguments,
                Ways(
                    results=results,
                    url=url,
                    token=token,
                    token_file=token_file,
                    destination=destination,
                    link=link,
                    carrier=carrier,
                ),
                ranks=ranks,
                exporter=exporter,
                export_options=export_options or {},
                after_seq=after_seq,
                monotonic=monotonic,
                sleep=sleep,
            )
        super().__init__(
            arguments,
            parts,
            owns_link=link is None,
            owns_exporter=exporter is None,
            monotonic=monotonic,
        )
        #: the newest step that was spoken of, and whether it was given to evald.
        self._step: int | None = None
        self._given = False
        self._due_s = monotonic()
        self._completed: int | None = None

    # --- points --------------------------------------------------------------------------------

    def baseline(self, *, completed_step: int | None = None) -> Dispatched:
        """Ask for the base model's point, once for each run; before the first step.

        ``completed_step``: where a resumed job goes on from (``resume`` tells it as well). A run
        that has no step left to train gets no baseline, a run of no steps at all does.
        """
        if completed_step is not None:
            self._completed = step_number("completed_step", completed_step)
        step, schedule = self._arguments.baseline_step, self._schedule
        resumed, last = self._completed, schedule.last_step
        nothing_left = (
            resumed is not None and last is not None and schedule.first_step <= last <= resumed
        )
        if not self._arguments.baseline or nothing_left:
            return Dispatched("not_due", step)
        if self._dry_run:
            return Dispatched("dry_run", step)
        self._all.settle()
        return self._all.agree(self._ask_for_baseline, _lost(step))

    def resume(
        self,
        completed_step: int,
        weights: Any = None,
        *,
        path: str | os.PathLike[str] | None = None,
    ) -> Dispatched:
        """Give evald the step that a resumed job has completed, before it makes another.

        Call it once, after the weights are loaded and before the first new step. Without a record
        of that step in the ledger (the job died between the step and its export) these weights are
        published as that step's, due or not, and this returns once they are: the next step's
        weights can never be taken for them. What an earlier life has staged is not exported again.
        ``path``: the checkpoint that was loaded, to be measured where it is, instead of
        ``weights``. A ``completed_step`` before the first step is none.
        """
        completed_step, where = step_number("completed_step", completed_step), _where(path)
        self._completed = completed_step
        if completed_step < self._schedule.first_step:
            return Dispatched("not_due", completed_step)
        if self._dry_run:
            return Dispatched("dry_run", completed_step)
        if weights is None and where is None:
            self._need_weights(completed_step)
        self._all.settle()
        result = self._all.give(
            completed_step,
            weights,
            lambda desk: desk.decide_resumed(completed_step, weights, where),
            final=False,
        )
        if result.action != "published":
            return result
        failed = self._all.finish_exports(self._arguments.backpressure_timeout_s)
        return failed.get(completed_step, result)

    def maybe_dispatch(
        self, step: int, weights: Any = None, *, epoch_end: bool = False
    ) -> Dispatched:
        """Give evald the weights after ``step``, if it is due; call it after every step.

        ``epoch_end``: the step ends an epoch, so it is due. A step that is not due costs no I/O.
        Twice for the same step is once; a step that comes again after others (the job went back) is
        a new revision. ``weights``: as ``SnapshotExporter`` takes them; None in mode "reuse".
        """
        step = step_number("step", step)
        if step < self._schedule.first_step:
            raise ValueError(
                f"cannot dispatch step {step}: with first_step={self._schedule.first_step} no step "
                "has that number; correct first_step, or the number"
            )
        self._all.settle()
        if step != self._step:
            self._step, self._given = step, False
        if not self._is_due(step, epoch_end=epoch_end):
            return Dispatched("not_due", step)
        if self._given:
            return Dispatched("known", step)
        if self._dry_run:
            self._given = True
            return Dispatched("dry_run", step)
        if weights is None:
            self._need_weights(step)
        self._given = True
        final = self._schedule.is_last(step)
        return self._all.give(
            step, weights, lambda desk: desk.decide_step(step, weights, final=final), final=final
        )

    def finish(
        self,
        last_step: int,
        weights: Any = None,
        *,
        path: str | os.PathLike[str] | None = None,
    ) -> Dispatched:
        """Say that the run is over after ``last_step``, and see that this step has its point.

        A last step that has none yet (it was off cadence, or training stopped early) is published
        now from ``weights`` (or ``path``), as the run's final snapshot; without weights it is
        skipped ``ckpt_missing``. It is never skipped ``busy``: it waits for room, at most
        ``backpressure_timeout_s``, and is then published in any case. evald reports the run's end
        once every point has ended. For a run of no steps, name the step before the first.
        """
        last_step, where = step_number("last_step", last_step), _where(path)
        result = Dispatched("not_due", last_step)
        if self._dry_run:
            return Dispatched("dry_run", last_step)
        self._all.settle()
        if last_step >= self._schedule.first_step:
            result = self._all.give(
                last_step,
                weights,
                lambda desk: desk.decide_last(last_step, weights, where),
                final=True,
            )
        if self._parts.desk is not None:
            self._parts.desk.end_run(last_step)
        return result

    # -------------------------------------------------------------------------------------------

    def _ask_for_baseline(self) -> Dispatched:
        step = self._arguments.baseline_step
        if self._parts.desk is None:
            return _lost(step)
        return guarded(
            "ask for the baseline", self._parts.desk.decide_baseline, lambda _: _lost(step)
        )

    def _is_due(self, step: int, *, epoch_end: bool) -> bool:
        schedule = self._schedule
        if schedule.every_s is None or self._dry_run:
            return schedule.is_due(step, epoch_end=epoch_end)
        since_s = self._monotonic() - self._due_s
        due = self._all.agree(
            lambda: schedule.is_due(step, epoch_end=epoch_end, since_s=since_s), otherwise=False
        )
        if due:
            self._due_s = self._monotonic()
        return due

    def _need_weights(self, step: int) -> None:
        if self._arguments.mode != "reuse":
            raise ValueError(
                f"cannot publish step {step} without weights: pass the model, a state dict, or an "
                "iterator of (name, tensor)"
            )


def _where(path: Any) -> Path | None:
    """Return a checkpoint's path; raises ValueError for what is none."""
    try:
        return None if path is None else Path(path)
    except TypeError:
        raise ValueError(f"cannot use path={path!r}: give a checkpoint's directory") from None


def _lost(step: int) -> Dispatched:
    return Dispatched("skipped", step, SkipReason.EXPORT_FAILED, "see the log")
