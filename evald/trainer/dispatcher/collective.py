"""What all ranks do together: hear rank 0's decision, export, and settle what has come of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from evald.errors import EvaldError
from evald.point import SkipReason
from evald.trainer.contract import ExportError, trace_of
from evald.trainer.dispatcher.assembly import Parts, Prepares
from evald.trainer.dispatcher.desk import Decision, Desk
from evald.trainer.dispatcher.outcomes import Dispatched, Export
from evald.trainer.failure import skip_of

log = structlog.get_logger(__name__)

T = TypeVar("T")
#: while rank 0 waits, the others hear from it this often: far below any rank's own timeout.
_SIGN_OF_LIFE_S = 20.0
_WAIT = "evald: wait"


def guarded(what: str, work: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """Return what ``work`` returns, or ``otherwise`` of what it raised.

    The boundary between training and its evaluation: training never dies of this.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - this boundary is for whatever may come
        trace = {} if isinstance(error, EvaldError) else {"trace": trace_of(error)}
        log.warning("dispatcher_fault", what=what, detail=str(error), **trace)
        return otherwise(error)


class Collective:
    """One process's share of what the ranks do together."""

    def __init__(self, parts: Parts, monotonic: Callable[[], float]) -> None:
        self._ranks = parts.ranks
        self._monotonic = monotonic
        #: when the others last heard of rank 0; None: they wait for nothing.
        self._heard_s: float | None = None
        self._desk = desk = parts.desk
        self._exporter = parts.exporter
        self._exports: list[tuple[int, concurrent.futures.Future[Path]]] = []
        self._is_prepared = False
        if desk is not None:
            desk.traffic.on_turn = self._on_turn

    def agree(self, mine: Callable[[], T], otherwise: T) -> T:
        """Return rank 0's value on every rank, or ``otherwise`` when a rank is lost."""
        try:
            heard: T = self._hear(mine)
        except ExportError as lost:
            log.warning("ranks_lost", detail=str(lost))
            return otherwise
        return heard

    def baseline(self, step: int) -> Dispatched:
        """Ask for the base model's point."""
        lost = Dispatched("skipped", step, SkipReason.EXPORT_FAILED, "see the log")

        def ask() -> Dispatched:
            if self._desk is None:
                return lost
            return guarded("ask for the baseline", self._desk.decide_baseline, lambda _: lost)

        self.settle()
        return self.agree(ask, lost)

    def give(
        self, step: int, weights: Any, decide: Callable[[Desk], Decision], *, final: bool
    ) -> Dispatched:
        """Do what rank 0 decides about a step: nothing more, or export its weights."""
        self.settle()
        decision: Decision
        try:
            decision = self._hear(lambda: self._decide(step, decide))
        except ExportError as lost:
            return self._failed(step, lost)
        if isinstance(decision, Export):
            return self._export(step, weights, decision, final=final)
        return decision

    def prepare(self, weights: Any) -> None:
        """Let the exporter take its memory, once: the first step that is due waits less."""
        if self._is_prepared:
            return
        self._is_prepared = True
        if isinstance(self._exporter, Prepares):
            # weights that this rank, or another one, has only when they are due: then not
            with contextlib.suppress(ValueError):
                self._exporter.prepare(weights)

    def settle(self) -> dict[int, Dispatched]:
        """Take in exports that have ended; return the failed ones by step. Never waits."""
        failed = {}
        for step, future in [one for one in self._exports if one[1].done()]:
            self._exports.remove((step, future))
            error = _error_of(future)
            if error is not None:
                failed[step] = self._failed(step, error)
            elif self._desk is not None:
                self._desk.traffic.export_ended(step, future.result())
        if self._desk is not None:
            guarded("settle", self._desk.traffic.settle, lambda _: None)
        return failed

    def finish_exports(self, timeout_s: float) -> dict[int, Dispatched]:
        """Wait for the exports of this process; return the failed ones by step."""
        concurrent.futures.wait([future for _, future in self._exports], timeout_s)
        return self.settle()

    def _on_turn(self) -> None:
        """Go on while rank 0 waits; now and then the others are told that it does."""
        self.settle()
        now_s = self._monotonic()
        if self._heard_s is not None and now_s - self._heard_s >= _SIGN_OF_LIFE_S:
            self._heard_s = now_s
            if self._ranks.size > 1:
                self._ranks.exchange(_WAIT)

    def _hear(self, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns on rank 0; the others wait for it. Raises PeerLost."""
        if self._ranks.rank != 0:
            while (heard := self._ranks.exchange(None)[0]) == _WAIT:
                pass
            return heard
        self._heard_s = self._monotonic()
        try:
            decision = decide()
        finally:
            self._heard_s = None
        return self._ranks.exchange(decision)[0]

    def _decide(self, step: int, decide: Callable[[Desk], Decision]) -> Decision:
        desk = self._desk
        if desk is None:  # rank 0 always has one
            raise EvaldError("cannot decide on a rank other than 0 (a bug of evald)")
        return guarded(
            f"decide about step {step}",
            lambda: decide(desk),
            lambda error: desk.traffic.skip(step, *skip_of(error, step)),
        )

    def _export(self, step: int, weights: Any, decision: Export, *, final: bool) -> Dispatched:
        if self._desk is not None:
            self._desk.traffic.export_begins(step, decision.size_bytes)
        future: concurrent.futures.Future[Path] = guarded(
            f"export step {step}",
            lambda: self._exporting(weights, step, run=decision.run, final=final),
            _failed_future,
        )
        self._exports.append((step, future))
        return self.settle().get(step) or Dispatched("published", step)

    def _exporting(
        self, weights: Any, step: int, *, run: str | None, final: bool
    ) -> concurrent.futures.Future[Path]:
        if self._exporter is None:
            raise EvaldError(f"cannot export step {step}: mode='reuse' exports nothing")
        return self._exporter.export(weights, step, final=final, run=run)

    def _failed(self, step: int, error: BaseException) -> Dispatched:
        reason, detail = skip_of(error, step)
        if self._desk is not None:
            return self._desk.traffic.export_failed(step, reason, detail)
        return Dispatched("skipped", step, reason, detail)


def _failed_future(error: Exception) -> concurrent.futures.Future[Path]:
    future: concurrent.futures.Future[Path] = concurrent.futures.Future()
    future.set_exception(error)
    return future


def _error_of(future: concurrent.futures.Future[Path]) -> BaseException | None:
    """Return why an export that has ended failed; None: it did not."""
    try:
        return future.exception()
    except concurrent.futures.CancelledError as cancelled:
        return EvaldError(f"the export was cancelled: {cancelled or 'its exporter was closed'}")
