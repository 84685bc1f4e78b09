"""What comes after points were given: their records, the wait for the last of them, the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import structlog

from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.assembly import Parts
from evald.trainer.dispatcher.collective import Collective, guarded
from evald.trainer.dispatcher.outcomes import Drained
from evald.trainer.shared import shared_eval, step_number, wait_seconds

log = structlog.get_logger(__name__)


class Aftermath:
    """The part of a dispatcher that gives nothing new; a context manager that closes it."""

    def __init__(
        self,
        arguments: Arguments,
        parts: Parts,
        *,
        owns_link: bool,
        owns_exporter: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = arguments
        self._parts = parts
        self._owns_link = owns_link
        self._owns_exporter = owns_exporter
        self._monotonic = monotonic
        #: records that nobody was told of yet.
        self._untold: deque[dict[str, Any]] = deque()
        self._all = Collective(
            parts.ranks, desk=parts.desk, exporter=parts.exporter, monotonic=monotonic
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def poll(
        self, on_record: Callable[[dict[str, Any]], None] | None = None
    ) -> list[dict[str, Any]]:
        """Return the run's new ``set`` and ``point`` records, oldest first; [] on other ranks.

        ``on_record`` is called with each of them first; if it raises, the next call goes on with
        the record after that. Records have what the ledger's have: ``step``, ``outcome``,
        ``metrics``, ... Nothing is waited for.
        """
        desk = self._parts.desk
        if desk is None:
            return []
        self._all.settle()
        guarded("look at the ledger", desk.look, lambda _: None)
        self._untold.extend(desk.node.news())
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
        return 0 if self._parts.desk is None else self._parts.desk.node.seq

    def drain(self, timeout_s: float) -> Drained:
        """Wait until every point of the run has its terminal record; false with what is missing.

        Exports and transfers under way are waited for first. Ends early when the daemon shows no
        sign of life, or its host cannot be reached. Ranks other than 0 wait only for their own
        share of an export.
        """
        timeout_s = wait_seconds("timeout_s", timeout_s)
        desk, began_s = self._parts.desk, self._monotonic()
        if desk is None:
            self._all.finish_exports(timeout_s)
            return Drained()
        return guarded(
            "drain",
            lambda: desk.drain(timeout_s, began_s),
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
            post=desk.post,
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
        if (exporter := parts.exporter) is not None and self._owns_exporter:
            guarded("close the exporter", lambda: exporter.close(left_s()), lambda _: None)
            self._all.settle()
        if parts.courier is not None and not parts.courier.close(left_s()):
            log.warning("spool_not_empty", root=str(self._arguments.root))
        if parts.link is not None and self._owns_link:
            guarded("close the link", parts.link.close, lambda _: None)
        guarded("let go of the ranks", parts.close_ranks, lambda _: None)
