"""What rank 0 decides: snapshot, request or skip for a due step.

Everything that touches files, the daemon or the clock is here and in ``traffic``; other ranks never
are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from evald.point import Kind, SkipReason
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.inflight import Name
from evald.trainer.dispatcher.outcomes import Dispatched, Export, counted
from evald.trainer.dispatcher.space import snapshot_bytes
from evald.trainer.dispatcher.traffic import Traffic

Decision: TypeAlias = Dispatched | Export


class Desk:
    """Decides on rank 0; ``traffic`` is what comes of it."""

    def __init__(self, arguments: Arguments, traffic: Traffic) -> None:
        self.traffic = traffic
        self._node = traffic.node
        self._arguments = arguments

    def decide_step(self, step: int, weights: Any, *, final: bool) -> Decision:
        """Decide about a step that is due; a ``final`` one is never skipped ``busy``."""
        self.traffic.look()
        return self._decide(step, weights, None, forced=final, final=final)

    def decide_resumed(self, step: int, weights: Any, path: Path | None) -> Decision:
        """Decide about the step that a resumed job has completed, before it makes another."""
        self.traffic.look()
        self.traffic.given.add(step)
        name = Name(Kind.STEP, step)
        if self._node.points.has_ended(name) or self._node.points.is_pending(name):
            return Dispatched("known", step)
        return self._decide(step, weights, path, forced=True, final=False)

    def decide_last(self, step: int, weights: Any, path: Path | None) -> Decision:
        """Decide about the last step, which may have its point already.

        What the ledger knows of a step that this life has trained again is about other weights.
        """
        self.traffic.look()
        if step in self.traffic.given:
            return Dispatched("known", step)
        if path is None and weights is None and self._arguments.mode != "reuse":
            if (before := self.traffic.skipped.get(step)) is not None:
                return before
            detail = f"the run ended at step {step}, and finish() was not given its weights"
            return self.traffic.skip(step, SkipReason.CKPT_MISSING, detail)
        return self._decide(step, weights, path, forced=True, final=True)

    def decide_baseline(self) -> Dispatched:
        """Ask for the baseline, once for each run."""
        step = self._arguments.baseline_point
        self.traffic.look()
        if self._node.points.any_baseline():
            return Dispatched("known", step)
        return self.traffic.ask_for_baseline(step, self._arguments.baseline_model)

    def _decide(
        self, step: int, weights: Any, path: Path | None, *, forced: bool, final: bool
    ) -> Decision:
        if path is None and self._arguments.mode == "reuse":
            path = self._saved(step)
        if path is not None and not path.is_dir():
            return self.traffic.skip(
                step,
                SkipReason.CKPT_MISSING,
                f"cannot reuse checkpoint {path}: there is no such directory; the trainer saves "
                "none at this step, or has not saved it yet",
            )
        held = self._make_way(step, forced=forced)
        if held is not None:
            return held
        if path is not None:
            return self.traffic.reuse(step, path)
        need = snapshot_bytes(weights, self._arguments.base_folder) or 0
        if (refused := self._refuse_big(step, need, final=final)) is not None:
            return refused
        return Export(self.traffic.run(), need)

    def _make_way(self, step: int, *, forced: bool) -> Dispatched | None:
        """Wait, if that is allowed, until the step may be published; else skip it."""
        traffic, points = self.traffic, self._node.points
        may_wait = forced or self._arguments.overflow == "backpressure"
        timeout_s = self._arguments.backpressure_timeout_s if may_wait else 0.0
        exporting = traffic.exporting
        written = traffic.wait(lambda: not exporting, timeout_s, for_daemon=False)
        if not written and not forced:
            detail = f"the snapshot of step {min(exporting)} is still being written"
            return traffic.skip(step, SkipReason.BUSY, detail)
        name = Name(Kind.STEP, step)

        def is_free() -> bool:
            return not points.is_pending(name) and len(points.taking_room()) < self._node.cap

        if traffic.wait(is_free, timeout_s) or (forced and not points.is_pending(name)):
            return None
        waited = f" after {timeout_s:g} s of waiting" if may_wait else ""
        in_flight = len(points.taking_room())
        if points.is_pending(name):
            reason = SkipReason.BUSY
            detail = f"an earlier point of this step has not ended{waited}"
        elif not self._node.pulse.alive:
            reason = SkipReason.UNHEALTHY
            waiting = counted(in_flight, "waits", "wait")
            detail = f"{waiting} for a daemon that shows no sign of life"
        else:
            reason = SkipReason.BUSY
            flying = counted(in_flight, "is in flight", "are in flight")
            detail = f"{flying}{waited}, and the cap is {self._node.cap}"
        return traffic.skip(step, reason, detail)

    def _refuse_big(self, step: int, need: int, *, final: bool) -> Dispatched | None:
        if not need:  # nothing tells
            return None
        status = self._node.status
        detail = self.traffic.room.take(
            step,
            need,
            exporting_bytes=sum(self.traffic.exporting.values()),
            far=status.staging if status is not None else None,
            alive=self._node.staging is not None,
            on_its_way_bytes=self._node.points.unlisted_bytes(),
            final=final,
        )
        return None if detail is None else self.traffic.skip(step, SkipReason.NO_SPACE, detail)

    def _saved(self, step: int) -> Path:
        pattern = self._arguments.checkpoint_path or ""
        return Path(pattern.replace("{step}", str(step))).absolute()
