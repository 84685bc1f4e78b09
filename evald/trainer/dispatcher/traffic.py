"""What is on its way from this job to evald, and what training waits for; rank 0's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from evald.point import Kind, SkipReason
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.inflight import Name
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.outbox import Outbox
from evald.trainer.dispatcher.outcomes import Dispatched, Drained, counted
from evald.trainer.dispatcher.space import Room
from evald.trainer.dispatcher.staged import published_digest
from evald.trainer.dispatcher.takeover import compare_names, take_over
from evald.trainer.publish.names import flat

log = structlog.get_logger(__name__)

#: pauses between two looks at the daemon while training waits.
_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
#: a living daemon shows something of a snapshot that is there long before.
_GONE_AFTER_S = 300.0
#: its beat goes on each second.
_CONFIRMED_WITHIN_S = 3.0
_BASELINE = "baseline"


class Traffic:
    """Exports, transfers and words under way, and the looks at the daemon.

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
        #: what they have been promised.
        self.room = Room(arguments.root)
        #: called on each turn of a wait: what else must go on.
        self.on_turn: Callable[[], None] = lambda: None
        #: steps that this life of the job has given, or went on from, and not skipped since.
        self.given: set[int] = set()
        #: what became of the steps that it has skipped, and not given since.
        self.skipped: dict[int, Dispatched] = {}
        #: why the newest step was skipped, if it was.
        self._said = ""
        self._ending: int | None = None
        self._took_over = False
        self._compared = False
        self._looked_for_beat = False
        #: steps that are measured where they are: nothing of them lies in the root.
        self._reused: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing of this process is on its way to the daemon any more."""
        carried = self._courier is None or not self._courier.busy
        return not self.exporting and carried and not self._outbox.waiting and self._ending is None

    def run(self) -> str | None:
        """Return the run that what is given now is of; None: the daemon decides.

        Once, a beat is waited for: a status alone may be one that another experiment's daemon has
        left behind.
        """
        node = self.node
        unsure = node.own_run is None and node.status is not None and not node.pulse.confirmed
        if unsure and not self._looked_for_beat:
            self._looked_for_beat = True
            self.wait(lambda: node.pulse.confirmed, _CONFIRMED_WITHIN_S)
        return node.own_run

    # --- words ---------------------------------------------------------------------------------

    def skip(self, step: int, reason: str, detail: str) -> Dispatched:
        """Say that a step gets no snapshot; the ledger keeps what it knows of the step."""
        name, points = Name(Kind.STEP, step), self.node.points
        tell = log.warning
        if reason in {SkipReason.BUSY, SkipReason.UNHEALTHY}:
            tell = log.debug if reason == self._said else log.info
        self._said = reason
        tell("point_skipped", step=step, reason=reason, detail=detail)
        self.given.discard(step)
        if not (points.is_known(name) or points.is_pending(name) or points.is_skipped(name)):
            self._outbox.skip(step, reason, detail, run=self.run())
            points.drop(name, now_s=self._monotonic(), skipped=True)
        self.skipped[step] = Dispatched("skipped", step, reason, detail)
        return self.skipped[step]

    def reuse(self, step: int, path: Path) -> Dispatched:
        """Ask for a point of a checkpoint that is measured where it is."""
        self._reused.add(step)
        self.given.add(step)
        self.skipped.pop(step, None)
        content = {"kind": "reuse", "step": step, "path": os.fspath(path.absolute())}
        return self._request(_reuse(step), content, Name(Kind.STEP, step))

    def ask_for_baseline(self, step: int, model: Path | None) -> Dispatched:
        """Ask for the base model's point; ``model`` None: the daemon knows it."""
        content: dict[str, Any] = {"kind": "baseline", "step": step}
        if model is not None:
            content["path"] = str(model)
        return self._request(_BASELINE, content, Name(Kind.BASELINE, step))

    def _request(self, word: str, content: dict[str, Any], point: Name) -> Dispatched:
        self._outbox.request(word, content, run=self.run())
        self.node.points.drop(point, now_s=self._monotonic())
        return Dispatched("requested", point.step)

    def post(self, word: str, content: dict[str, Any]) -> Callable[[], None]:
        """Give evald a request; what is returned takes it back if it still can."""
        self._outbox.request(word, content, run=self.run())
        return functools.partial(self._outbox.withdraw, word)

    def end_run(self, last_step: int) -> None:
        """Say that the run is over, after everything that is still on its way."""
        self.run()  # not when the last export ends: nobody waits then
        self._ending = last_step
        self.settle()

    # --- exports -------------------------------------------------------------------------------

    def export_begins(self, step: int, size_bytes: int) -> None:
        """Note that the ranks gather a step's weights."""
        self.exporting[step] = size_bytes
        self.node.points.drop(Name(Kind.STEP, step), now_s=self._monotonic(), size_bytes=size_bytes)
        self.given.add(step)
        self.skipped.pop(step, None)
        self._said = ""
        self._reused.discard(step)

    def export_ended(self, step: int, path: Path) -> None:
        """Note that the step's snapshot is published in the local root."""
        name = Name(Kind.STEP, step)
        self.exporting.pop(step, None)
        self.room.give_back(step)
        self.node.points.restart_waiting(self._monotonic(), name)
        if (digest := published_digest(path / self._arguments.marker)) is not None:
            self.node.identify(name, digest)
        if self._courier is not None:
            self._courier.add(path, step=step)

    def export_failed(self, step: int, reason: str, detail: str) -> Dispatched:
        """Note that nothing of the step was published."""
        self.exporting.pop(step, None)
        self.room.give_back(step)
        self.node.points.forget(Name(Kind.STEP, step))
        return self.skip(step, reason, detail)

    # --- what goes on --------------------------------------------------------------------------

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
            self._outbox.end_run(self._ending, run=self.node.own_run)
            self._ending = None

    def look(self, *, urgent: bool = False) -> None:
        """Ask the daemon; the first time, take over what an earlier life has left behind."""
        self.node.look(urgent=urgent)
        if self.idle:
            self.node.settle(self._is_gone)
            self._give_up_gone()
        if not self._took_over:
            self._took_over = True
            take_over(self._arguments, self.node, self._courier, now_s=self._monotonic())
        if not self._compared and self.node.status is not None:
            self._compared = True
            compare_names(self._arguments, self.node.status.staging)

    def _is_gone(self, name: Name) -> bool:
        """Tell whether what was dropped has left the root; a far one cannot be seen."""
        return self._courier is None and not os.path.lexists(self._where(name))

    def _where(self, name: Name) -> Path:
        arguments = self._arguments
        folder = arguments.pattern.replace("{step}", str(name.step))
        if name.kind is Kind.BASELINE:
            folder = f"{_BASELINE}.request"
        elif self.node.points.is_skipped(name):
            folder = f"{flat(folder)}.skip"
        elif name.step in self._reused:
            folder = f"{_reuse(name.step)}.request"
        return arguments.root / folder

    def _give_up_gone(self) -> None:
        """Skip snapshots that somebody removed before the daemon took them: no answer comes."""
        points = self.node.points
        if not self.node.pulse.alive:
            return
        for name in points.unseen(self._monotonic(), _GONE_AFTER_S):
            is_word = name.kind is not Kind.STEP or points.is_skipped(name)
            if not is_word and name.step not in self._reused and self._is_gone(name):
                points.forget(name)
                detail = f"the snapshot {self._where(name)} was removed before evald had taken it"
                self.skip(name.step, SkipReason.CKPT_MISSING, detail)

    # --- waits ---------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> Drained:
        """Wait until every point has its record, ``timeout_s`` at most."""
        points, pulse, began_s = self.node.points, self.node.pulse, self._monotonic()

        def left_s() -> float:
            return timeout_s - (self._monotonic() - began_s)

        def cut_off() -> bool:
            far = self._courier is not None and self._courier.unreachable
            return far and self._monotonic() - began_s >= pulse.dead_after_s

        # what is still in this process needs no daemon
        self.wait(lambda: self.idle or cut_off(), left_s(), for_daemon=False)
        self.look(urgent=True)
        if pulse.seen:
            pulse.give_time()  # it may be starting again

        def is_done() -> bool:
            return self.idle and not points.missing()

        if self.wait(lambda: is_done() or cut_off(), left_s()) and is_done():
            return Drained()
        missing = tuple(map(str, points.missing()))
        what = counted(len(missing), "has no record", "have no record")
        if self._outbox.waiting:
            what = f"words could not be written: {self._outbox.fault}"
        elif not missing:
            what = "not all has left this host"
        if cut_off():
            why = "the eval node cannot be reached"
        elif pulse.dead:
            why = f"the daemon has shown no sign of life for {pulse.dead_after_s:g} s"
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
                self.look(urgent=True)
        return True


def _reuse(step: int) -> str:
    """Return the name of the request to measure a step's checkpoint where it is."""
    return f"reuse_{step}"
