"""Give evald its points from inside a training loop, without holding the loop up or ending it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import structlog

from evald.trainer.contract import Alone, Carrier, Link, Ranks
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.assembly import Exporter, Parts, build_parts
from evald.trainer.dispatcher.cadence import Cadence
from evald.trainer.dispatcher.collective import Collective, guarded
from evald.trainer.dispatcher.outcomes import Dispatched, Drained
from evald.trainer.dispatcher.schedule import Schedule
from evald.trainer.dispatcher.ways import Ways
from evald.trainer.publish.names import checked_root
from evald.trainer.shared import shared_eval
from evald.trainer.values import AnyPath, checkpoint, step_number, wait_seconds

log = structlog.get_logger(__name__)


class EvalDispatcher:
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
        ``root``: the staging root, or a run's folder in it. ``run``: the run id (None: the folder's
        name, or the daemon's). ``pattern``, ``marker``: as in the daemon's config. ``results``: the
        ledger, on a file system that both see (None: where the status in ``root`` says), or
        ``url``: the daemon's HTTP API, with ``token`` or ``token_file``. ``destination``: the
        staging root of another host, ``host:/dev/shm/evald`` or a directory; ``root`` is then a
        local spool, which a thread brings there and empties. ``after_seq``: ``poll`` begins after
        this record (None: with what comes from now on).

    ``ranks``, ``exporter``, ``link``, ``carrier`` replace the parts that are built otherwise; they
    are the caller's to close. With torch.distributed, build this after ``init_process_group``, on
    every rank. Raises ValueError for wrong or contradicting arguments, EvaldError where a token
    cannot be read or rsync is missing.
    """

    def __init__(
        self,
        root: AnyPath,
        *,
        first_step: Literal[0, 1],
        base_dir: AnyPath | None = None,
        run: str | None = None,
        interval: int | None = None,
        steps: Iterable[int] | None = None,
        epoch_steps: int | None = None,
        every_minutes: float | None = None,
        num_steps: int | None = None,
        baseline: bool = True,
        baseline_step: int | None = None,
        baseline_path: AnyPath | None = None,
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
        results: AnyPath | None = None,
        url: str | None = None,
        token: str | None = None,
        token_file: AnyPath | None = None,
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
        ways = Ways(
            results=results,
            url=url,
            token=token,
            token_file=token_file,
            destination=destination,
            link=link,
            carrier=carrier,
        )
        if export_options is not None and not isinstance(export_options, Mapping):
            raise ValueError(
                f"cannot use export_options={export_options!r}: give a dict of arguments, such as "
                '{"dtype": "bfloat16"}'
            )
        model = checkpoint(baseline_path)
        self._arguments = arguments = Arguments(
            schedule=self._schedule,
            root=checked_root(root).absolute(),
            base_dir=base_dir,
            run=run,
            baseline=baseline,
            baseline_step=baseline_step,
            baseline_path=model if model is None or ways.far else model.absolute(),
            overflow=overflow,
            max_in_flight=max_in_flight,
            backpressure_timeout_s=backpressure_timeout_s,
            dead_after_s=dead_after_s,
            mode=mode,
            save_interval=save_interval,
            checkpoint_path=checkpoint_path,
            pattern=pattern,
            marker=marker,
            far=ways.far,
            has_exporter=exporter is not None,
        )
        self._dry_run = dry_run
        self._parts = Parts(Alone(), None)
        if not dry_run:
            self._parts = build_parts(
                arguments,
                ways,
                ranks=ranks,
                exporter=exporter,
                export_options=export_options or {},
                after_seq=after_seq,
                monotonic=monotonic,
                sleep=sleep,
            )
        self._own_exporter = None if exporter is not None else self._parts.exporter
        self._own_link = None if link is not None else self._parts.link
        self._monotonic = monotonic
        self._all = Collective(self._parts, monotonic)
        self._cadence = Cadence(self._schedule, self._all, monotonic)
        self._completed: int | None = None
        #: records that nobody was told of yet.
        self._untold: deque[dict[str, Any]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- points --------------------------------------------------------------------------------

    def baseline(self, *, completed_step: int | None = None) -> Dispatched:
        """Ask for the base model's point, once for each run; before the first step.

        ``completed_step``: where a resumed job goes on from (``resume`` tells it as well). A run
        that has no step left to train gets no baseline, a run of no steps at all does.
        """
        if completed_step is not None:
            self._completed = step_number("completed_step", completed_step)
        step, schedule = self._arguments.baseline_point, self._schedule
        resumed, last = self._completed, schedule.last_step
        nothing_left = (
            resumed is not None and last is not None and schedule.first_step <= last <= resumed
        )
        if not self._arguments.baseline or nothing_left:
            return Dispatched("not_due", step)
        if self._dry_run:
            return Dispatched("dry_run", step)
        return self._all.baseline(step)

    def resume(
        self, completed_step: int, weights: Any = None, *, path: AnyPath | None = None
    ) -> Dispatched:
        """Give evald the step that a resumed job has completed, before it makes another.

        Call it once, after the weights are loaded and before the first new step. Without a record
        of that step in the ledger (the job died between the step and its export) these weights are
        published as that step's, due or not, and this returns once they are: the next step's
        weights can never be taken for them. What an earlier life has staged is not exported again.
        ``path``: the checkpoint that was loaded, to be measured where it is, instead of
        ``weights``. A ``completed_step`` before the first step is none.
        """
        completed_step, where = step_number("completed_step", completed_step), checkpoint(path)
        self._completed = completed_step
        if completed_step < self._schedule.first_step:
            return Dispatched("not_due", completed_step)
        if self._dry_run:
            return Dispatched("dry_run", completed_step)
        if where is None:
            self._check_weights(completed_step, weights)
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

        ``epoch_end``: the step ends an epoch, so it is due. A step that is not due costs no I/O
        (but the first of mode "async", which takes the host memory for exports).
        Twice for the same step is once; a step that comes again after others (the job went back) is
        a new revision. ``weights``: as ``SnapshotExporter`` takes them; None in mode "reuse".
        """
        step = self._cadence.follow(step)
        self._all.settle()
        if not self._cadence.is_due(step, epoch_end=epoch_end):
            if self._arguments.mode == "async" and not self._dry_run:
                self._all.prepare(weights)
            return Dispatched("not_due", step)
        if self._cadence.is_done:
            return Dispatched("known", step)
        self._check_weights(step, weights)
        self._cadence.is_done = True
        if self._dry_run:
            return Dispatched("dry_run", step)
        final = self._schedule.is_last(step)
        return self._all.give(
            step, weights, lambda desk: desk.decide_step(step, weights, final=final), final=final
        )

    def finish(
        self, last_step: int, weights: Any = None, *, path: AnyPath | None = None
    ) -> Dispatched:
        """Say that the run is over after ``last_step``, and see that this step has its point.

        A last step that has none yet (it was off cadence, or training stopped early) is published
        now from ``weights`` (or ``path``), as the run's final snapshot; without weights it is
        skipped ``ckpt_missing``. It is never skipped ``busy``: it waits for room, at most
        ``backpressure_timeout_s``, and is then published in any case. evald reports the run's end
        once every point has ended. For a run of no steps, name the step before the first.
        """
        last_step, where = step_number("last_step", last_step), checkpoint(path)
        self._cadence.end(last_step)
        result = Dispatched("not_due", last_step)
        if self._dry_run:
            return Dispatched("dry_run", last_step)
        if weights is not None and where is None:
            self._check_weights(last_step, weights)
        if last_step >= self._schedule.first_step:
            result = self._all.give(
                last_step,
                weights,
                lambda desk: desk.decide_last(last_step, weights, where),
                final=True,
            )
        if self._parts.desk is not None:
            self._parts.desk.traffic.end_run(last_step)
        return result

    # --- what becomes of them ------------------------------------------------------------------

    def poll(
        self, on_record: Callable[[dict[str, Any]], None] | None = None
    ) -> list[dict[str, Any]]:
        """Return the run's new ``set`` and ``point`` records, oldest first; [] on other ranks.

        ``on_record`` is called with each of them first; if it raises, the next call goes on with
        the record after that. Records have what the ledger's have: ``step``, ``outcome``,
        ``metrics``, ... Nothing is waited for. Into W&B: ``evald.results.sinks.WandbBuffer``.
        """
        desk = self._parts.desk
        if desk is None:
            return []
        self._all.settle()
        guarded("look at the ledger", desk.traffic.look, lambda _: None)
        self._untold.extend(desk.traffic.node.news())
        news = []
        while self._untold:
            record = self._untold.popleft()
            if on_record is not None:
                on_record(record)
            news.append(record)
        return news

    @property
    def seq(self) -> int:
        """``seq`` up to which the ledger is read: what a later life gives as ``after_seq``."""
        return 0 if self._parts.desk is None else self._parts.desk.traffic.node.seq

    def drain(self, timeout_s: float) -> Drained:
        """Wait until every point of the run has its terminal record; false with what is missing.

        Exports and transfers under way are waited for first. Ends early when the daemon shows no
        sign of life, or its host cannot be reached. Ranks other than 0 wait only for their own
        share of an export.
        """
        timeout_s = wait_seconds("timeout_s", timeout_s)
        desk = self._parts.desk
        if desk is None:
            self._all.finish_exports(timeout_s)
            return Drained()
        return guarded(
            "drain",
            lambda: desk.traffic.drain(timeout_s),
            lambda error: Drained(detail=f"cannot drain: {error}"),
        )

    def shared_eval(
        self,
        step: int,
        weight_version: str,
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
        timeout_s: float,
    ) -> dict[str, Any] | None:
        """Have a step measured on the job's own engines while they are paused; its record.

        See ``evald.trainer.shared``. Rank 0 does it; others return None at once: let them wait.
        """
        step = step_number("step", step)
        desk, link = self._parts.desk, self._parts.link
        if desk is None or link is None:
            return None
        return shared_eval(
            self._arguments.root,
            step,
            weight_version,
            results=link,
            pause=pause,
            resume=resume,
            timeout_s=timeout_s,
            run=self._arguments.run,
            post=desk.traffic.post,
        )

    def close(self, timeout_s: float = 60.0) -> None:
        """Let exports and transfers end, for ``timeout_s``, and close what this object has opened.

        Points that have not ended are evald's: it goes on without the job.
        """
        timeout_s = wait_seconds("timeout_s", timeout_s)
        deadline = self._monotonic() + timeout_s

        def left_s() -> float:
            return max(deadline - self._monotonic(), 0.1)

        parts = self._parts
        self._all.finish_exports(timeout_s)
        if (exporter := self._own_exporter) is not None:
            guarded("close the exporter", lambda: exporter.close(left_s()), lambda _: None)
            self._all.settle()
        if parts.courier is not None and not parts.courier.close(left_s()):
            log.warning("spool_not_empty", root=str(self._arguments.root))
        if self._own_link is not None:
            guarded("close the link", self._own_link.close, lambda _: None)
        guarded("let go of the ranks", parts.close_ranks, lambda _: None)

    def _check_weights(self, step: int, weights: Any) -> None:
        if self._arguments.mode == "reuse" or self._dry_run:
            return
        if weights is None:
            raise ValueError(
                f"cannot publish step {step} without weights: pass the model, a state dict, or an "
                "iterator of (name, tensor)"
            )
        if (fault := self._parts.fault_of(weights, step)) is not None:
            raise ValueError(fault)
