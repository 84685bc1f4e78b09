"""What all ranks do together: hear rank 0's decision, export, and settle what has come of it."""

from __future__ import annotations

import concurrent.futures
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from evald.errors import EvaldError
from evald.trainer.contract import ExportError, Ranks
from evald.trainer.dispatcher.agreement import Agreement
from evald.trainer.dispatcher.assembly import Exporter
from evald.trainer.dispatcher.desk import EXPORT, Decision, Desk
from evald.trainer.dispatcher.faults import fault_of
from evald.trainer.dispatcher.outcomes import Dispatched

log = structlog.get_logger(__name__)

T = TypeVar("T")


def guarded(what: str, work: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """Return what ``work`` returns, or ``otherwise`` of what it raised.

    The boundary between training and its evaluation: training never dies of this.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - this boundary is for whatever may come
        # as text: a logger that shows local variables would show weights and tokens
        own = isinstance(error, EvaldError)
        trace = {} if own else {"trace": "".join(traceback.format_exception(error))}
        log.warning("dispatcher_fault", what=what, detail=str(error), **trace)
        return otherwise(error)


class Collective:
    """One process's share: ``desk`` is rank 0's, and None on every other rank."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        desk: Desk | None,
        exporter: Exporter | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agreement = Agreement(ranks, monotonic)
        self._desk = desk
        self._exporter = exporter
        self._exports: list[tuple[int, concurrent.futures.Future[Path]]] = []
        if desk is not None:
            desk.on_turn = self._on_turn

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._agreement.leads

    def agree(self, mine: Callable[[], T], otherwise: T) -> T:
        """Return rank 0's value on every rank, or ``otherwise`` when a rank is lost."""
        try:
            heard: T = self._agreement.decide(mine)
        except ExportError as lost:
            log.warning("ranks_lost", detail=str(lost))
            return otherwise
        return heard

    def give(
        self, step: int, weights: Any, decide: Callable[[Desk], Decision], *, final: bool
    ) -> Dispatched:
        """Do what rank 0 decides about a step: nothing more, or export its weights."""
        decision: Decision
        try:
            decision = self._agreement.decide(lambda: self._decide(step, decide))
        except ExportError as lost:
            return self._failed(step, lost)
        return self._export(step, weights, final=final) if decision == EXPORT else decision

    def settle(self) -> dict[int, Dispatched]:
        """Take in exports that have ended; return the failed ones by step. Never waits."""
        failed = {}
        for step, future in [one for one in self._exports if one[1].done()]:
            self._exports.remove((step, future))
            error = _error_of(future)
            if error is not None:
                failed[step] = self._failed(step, error)
            elif self._desk is not None:
                self._desk.export_ended(step, future.result())
        if self._desk is not None:
            guarded("settle", self._desk.settle, lambda _: None)
        return failed

    def finish_exports(self, timeout_s: float) -> dict[int, Dispatched]:
        """Wait for the exports of this process; return the failed ones by step."""
        concurrent.futures.wait([future for _, future in self._exports], timeout_s)
        return self.settle()

    def _on_turn(self) -> None:
        self.settle()
        self._agreement.keep_waiting()

    def _decide(self, step: int, decide: Callable[[Desk], Decision]) -> Decision:
        desk = self._desk
        if desk is None:  # rank 0 always has one
            raise EvaldError("cannot decide on a rank other than 0 (a bug of evald)")
        return guarded(
            f"decide about step {step}",
            lambda: decide(desk),
            lambda error: desk.skip(step, *fault_of(error, step)),
        )

    def _export(self, step: int, weights: Any, *, final: bool) -> Dispatched:
        if self._desk is not None:
            self._desk.export_begins(step)
        future: concurrent.futures.Future[Path] = guarded(
            f"export step {step}",
            lambda: self._exporting(weights, step, final=final),
            _failed_future,
        )
        self._exports.append((step, future))
        return self.settle().get(step) or Dispatched("published", step)

    def _exporting(
        self, weights: Any, step: int, *, final: bool
    ) -> concurrent.futures.Future[Path]:
        if self._exporter is None:
            raise EvaldError(f"cannot export step {step}: mode='reuse' exports nothing")
        return self._exporter.export(weights, step, final=final)

    def _failed(self, step: int, error: BaseException) -> Dispatched:
        reason, detail = fault_of(error, step)
        if self._desk is not None:
            return self._desk.export_failed(step, reason, detail)
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
