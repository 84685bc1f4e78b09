"""What rank 0 decides: snapshot, request or skip for a due step, and what training waits for.

Everything that touches files, the daemon or the clock is here; other ranks never are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import structlog

from evald.point import Kind, SkipReason
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.inflight import Name
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.outbox import Outbox
from evald.trainer.dispatcher.outcomes import Dispatched, Drained
from evald.trainer.dispatcher.space import shortage, snapshot_bytes
from evald.trainer.dispatcher.takeover import take_over

log = structlog.get_logger(__name__)

#: pauses between two looks at the daemon while training waits.
_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0

#: a living daemon shows something of a snapshot that is there long before.
_GONE_AFTER_S = 300.0

EXPORT: Literal["export"] = "export"


#: EXPORT: every rank takes part in the export now.
Decision = Dispatched | Literal["export"]


class Desk:
    """Decides on rank 0, keeps the accounting, and writes the words.

    ``sleep`` and ``monotonic`` are the clock that waits go by.
    """

    def __init__(
        self,
        arguments: Arguments,
        *,
        node: Node,
        outbox: Outbox,
        courier: Courier | None,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.node = node
        self._arguments = arguments
        self._outbox = outbox
        self._courier = courier
        self._monotonic = monotonic
        self._sleep = sleep
        #: bytes of the exports under way, by step.
        self.exporting: dict[int, int] = {}
        #: called on each turn of a wait: what else must go on.
        self.on_turn: Callable[[], None] = lambda: None
        #: steps that this life of the job has given, or went on from, and not skipped since.
        self._given: set[int] = set()
        self._ending: int | None = None
        #: estimate for the step that was decided on last.
        self._need_bytes: int | None = None
        self._took_over = False
        #: steps that are measured where they are: nothing of them lies in the root.
        self._reused: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing of this process is on its way to the daemon any more."""
        carried = self._courier is None or not self._courier.busy
        return not self.exporting and carried and not self._outbox.waiting and self._ending is None

    # --- decisions -----------------------------------------------------------------------------

    def decide_step(self, step: int, weights: Any, *, final: bool) -> Decision:
        """Decide about a step that is due; a ``final`` one is never skipped ``busy``."""
        self.look()
        return self._decide(step, weights, None, forced=final, final=final)

    def decide_resumed(self, step: int, weights: Any, path: Path | None) -> Decision:
        """Decide about the step that a resumed job has completed, before it makes another."""
        self.look()
        self._given.add(step)
        name = Name(Kind.STEP, step)
        if self.node.points.has_ended(name) or self.node.points.is_pending(name):
            return Dispatched("known", step)
        return self._decide(step, weights, path, forced=True, final=False)

    def decide_last(self, step: int, weights: Any, path: Path | None) -> Decision:
        """Decide about the last step, which may have its point already.

        What the ledger knows of a step that this life has trained again is about other weights.
        """
        self.look()
        if step in self._given:
            return Dispatched("known", step)
        if path is None and weights is None and self._arguments.mode != "reuse":
            detail = f"the run ended at step {step}, and finish() was not given its weights"
            return self.skip(step, SkipReason.CKPT_MISSING, detail)
        return self._decide(step, weights, path, forced=True, final=True)

    def _decide(
        self, step: int, weights: Any, path: Path | None, *, forced: bool, final: bool
    ) -> Decision:
        if path is None and self._arguments.mode == "reuse":
            path = self._saved(step)
        if path is not None and not path.is_dir():
            return self.skip(
                step,
                SkipReason.CKPT_MISSING,
                f"cannot reuse checkpoint {path}: there is no such directory; the trainer saves "
                "none at this step, or has not saved it yet",
            )
        held = self._make_way(step, forced=forced)
        if held is not None:
            return held
        if path is not None:
            return self._reuse(step, path)
        return self._refuse_big(step, weights, final=final) or EXPORT

    def decide_baseline(self) -> Dispatched:
        """Ask for the baseline, once for each run."""
        step = self._arguments.baseline_step
        self.look()
        if self.node.points.any_baseline():
            return Dispatched("known", step)
        content: dict[str, Any] = {"kind": "baseline", "step": step}
        if (path := self._arguments.baseline_model) is not None:
            content["path"] = str(path)
        self._outbox.request("baseline", content)
        self.node.points.drop(Name(Kind.BASELINE, step), now_s=self._monotonic())
        return Dispatched("requested", step)

    def skip(self, step: int, reason: str, detail: str) -> Dispatched:
        """Say that a step gets no snapshot; the ledger keeps what it knows of the step."""
        name, points = Name(Kind.STEP, step), self.node.points
        expected = reason in {SkipReason.BUSY, SkipReason.UNHEALTHY}
        (log.info if expected else log.warning)(
            "point_skipped", step=step, reason=reason, detail=detail
        )
        self._given.discard(step)
        if not points.is_known(name) and not points.is_pending(name):
            self._outbox.skip(step, reason, detail)
            points.drop(name, now_s=self._monotonic(), skipped=True)
        return Dispatched("skipped", step, reason, detail)

    def _make_way(self, step: int, *, forced: bool) -> Dispatched | None:
        """Wait, if that is allowed, until the step may be published; else skip it."""
        may_wait = forced or self._arguments.overflow == "backpressure"
        timeout_s = self._arguments.backpressure_timeout_s if may_wait else 0.0
        if self.exporting and not self._wait_for_exports(timeout_s) and not forced:
            before = min(self.exporting)
            return self.skip(
                step, SkipReason.BUSY, f"the snapshot of step {before} is still being written"
            )
        name, points = Name(Kind.STEP, step), self.node.points

        def is_free() -> bool:
            return not points.is_pending(name) and len(points.taking_room()) < self.node.cap

        if self.wait(is_free, timeout_s) or (forced and not points.is_pending(name)):
            return None
        waited = f" after {timeout_s:g} s of waiting" if may_wait else ""
        count, cap = len(points.taking_room()), self.node.cap
        if points.is_pending(name):
            return self.skip(
                step, SkipReason.BUSY, f"an earlier point of this step has not ended{waited}"
            )
        if not self.node.pulse.alive:
            return self.skip(
                step,
                SkipReason.UNHEALTHY,
                f"{count} points wait for a daemon that shows no sign of life",
            )
        return self.skip(
            step, SkipReason.BUSY, f"{count} points are in flight{waited}, and the cap is {cap}"
        )

    def _refuse_big(self, step: int, weights: Any, *, final: bool) -> Dispatched | None:
        need = self._need_bytes = snapshot_bytes(weights, self._arguments.base_folder)
        if need is None:
            return None
        detail = shortage(
            self._arguments.root,
            need,
            reserved_bytes=sum(self.exporting.values()),
            far=self.node.staging,
            on_its_way_bytes=self.node.points.unlisted_bytes(),
            final=final,
        )
        return None if detail is None else self.skip(step, SkipReason.NO_SPACE, detail)

    def _saved(self, step: int) -> Path:
        pattern = self._arguments.checkpoint_path or ""
        return Path(pattern.replace("{step}", str(step))).absolute()

    def _reuse(self, step: int, path: Path) -> Dispatched:
        content = {"kind": "reuse", "step": step, "path": os.fspath(path.absolute())}
        self._reused.add(step)
        self._outbox.request(f"reuse_{step}", content)
        self.node.points.drop(Name(Kind.STEP, step), now_s=self._monotonic())
        self._given.add(step)
        return Dispatched("requested", step)

    def post(self, name: str, content: dict[str, Any]) -> Callable[[], None]:
        """Give evald a request; what is returned takes it back if it still can."""
        self._outbox.request(name, content)
        return functools.partial(self._outbox.withdraw, name)

    # --- exports -------------------------------------------------------------------------------

    def export_begins(self, step: int) -> None:
        """Note that the ranks gather the weights of the step that was decided on last."""
        size = self._need_bytes or 0
        self.exporting[step] = size
        self.node.points.drop(Name(Kind.STEP, step), now_s=self._monotonic(), size_bytes=size)
        self._given.add(step)
        self._reused.discard(step)

    def export_ended(self, step: int, path: Path) -> None:
        """Note that the step's snapshot is published in the local root."""
        self.exporting.pop(step, None)
        self.node.points.restart_waiting(self._monotonic(), Name(Kind.STEP, step))
        if self._courier is not None:
            self._courier.add(path, step=step)

    def export_failed(self, step: int, reason: str, detail: str) -> Dispatched:
        """Note that nothing of the step was published."""
        self.exporting.pop(step, None)
        self.node.points.forget(Name(Kind.STEP, step))
        return self.skip(step, reason, detail)

    # --- what goes on --------------------------------------------------------------------------

    def end_run(self, last_step: int) -> None:
        """Say that the run is over, after everything that is still on its way."""
        self._ending = last_step
        self.settle()

    def settle(self) -> None:
        """Take in what the courier did, and write what could not be written; asks nobody."""
        for carried in self._courier.settled() if self._courier else ():
            # only now can the daemon answer it
            self.node.points.restart_waiting(self._monotonic())
            if carried.step is None:
                if carried.error is not None:
                    log.error("word_lost", path=str(carried.path), detail=str(carried.error))
            elif carried.error is not None:
                self.node.points.forget(Name(Kind.STEP, carried.step))
                self.skip(carried.step, carried.error.reason, str(carried.error))
        self._outbox.retry()
        if self._ending is not None and not self.exporting:
            self._outbox.end_run(self._ending)
            self._ending = None

    def look(self) -> None:
        """Ask the daemon; the first time, take over what an earlier life has left behind."""
        self.node.look()
        if self.idle:
            self.node.settle()
            self._give_up_gone()
        if not self._took_over:
            self._took_over = True
            take_over(self._arguments, self.node, self._courier, now_s=self._monotonic())

    def _give_up_gone(self) -> None:
        """Skip snapshots that somebody removed before the daemon took them: no answer comes."""
        if self._courier is not None or not self.node.pulse.alive:
            return  # (a spool is cleared by its courier)
        arguments = self._arguments
        for name in self.node.points.unseen(self._monotonic(), _GONE_AFTER_S):
            folder = arguments.root / arguments.pattern.replace("{step}", str(name.step))
            ours = arguments.mode != "reuse" and name.step not in self._reused
            if name.kind is Kind.STEP and ours and not os.path.lexists(folder):
                self.node.points.forget(name)
                detail = f"the snapshot {folder} was removed before evald had taken it"
                self.skip(name.step, SkipReason.CKPT_MISSING, detail)

    def drain(self, timeout_s: float, began_s: float) -> Drained:
        """Wait until every point has its record, ``timeout_s`` from ``began_s`` at most."""
        points, dead_after_s = self.node.points, self.node.pulse.dead_after_s

        def left_s() -> float:
            return timeout_s - (self._monotonic() - began_s)

        def cut_off() -> bool:
            far = self._courier is not None and self._courier.unreachable
            return far and self._monotonic() - began_s >= dead_after_s

        # what is still in this process needs no daemon
        self.wait(lambda: self.idle or cut_off(), left_s(), for_daemon=False)
        self.look()
        self.node.pulse.give_time()  # it may be starting again

        def is_done() -> bool:
            return self.idle and not points.missing()

        if self.wait(lambda: is_done() or cut_off(), left_s()) and is_done():
            return Drained()
        missing = tuple(map(str, points.missing()))
        what = f"{len(missing)} points have no record" if missing else "not all has left this host"
        if cut_off():
            why = "the eval node cannot be reached"
        elif self.node.pulse.dead:
            why = f"the daemon has shown no sign of life for {dead_after_s:g} s"
        else:
            why = f"{timeout_s:g} s are over"
        return Drained(missing, f"{what}, and {why}")

    def wait(
        self, condition: Callable[[], bool], timeout_s: float, *, for_daemon: bool = True
    ) -> bool:
        """Wait for ``condition``; False after ``timeout_s``.

        ``for_daemon``: it is the daemon that must do something, so that its death ends the wait.
        """
        began = self._monotonic()
        while not condition():
            waited_s = self._monotonic() - began
            if waited_s >= timeout_s or (for_daemon and self.node.pulse.dead):
                return False
            pause_s = min(_FIRST_POLL_S + 0.1 * waited_s, _LONGEST_POLL_S, timeout_s - waited_s)
            self._sleep(pause_s)
            self.on_turn()
            if for_daemon:
                self.look()
        return True

    def _wait_for_exports(self, timeout_s: float) -> bool:
        return self.wait(lambda: not self.exporting, timeout_s, for_daemon=False)
