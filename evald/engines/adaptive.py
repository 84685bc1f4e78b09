"""Looks at one engine while it works, and keeps its limit where ``LimitSearch`` finds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from evald.engines.api import EngineError, EngineRejected
from evald.engines.limit_search import LimitSearch, Load, Reading
from evald.engines.meter import Meter
from evald.engines.server_size import MOST, ServerSize
from evald.engines.slots import Slots

__all__ = ["MOST", "AdaptiveLimit", "read_load"]

log = structlog.get_logger(__name__)

#: between two looks; an idle engine is not asked.
LOOK_S = 1.0

#: asks a server for its /v1/loads, such as ``EngineAPI.loads``.
Loads = Callable[[], Awaitable[Mapping[str, Any]]]


class AdaptiveLimit:
    """Sets ``slots.limit`` of one engine; what it has found outlives the engine's restarts.

    It begins where the server's own size says (``learn``). ``most``: the configured bound, None for
    ``MOST``. ``clock``: seconds that only grow.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        engine: str,
        most: int | None = None,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._engine = engine
        self._look_s = look_s
        self._clock = clock
        self._most = most
        #: what the server said when it was started last.
        self._size = ServerSize()
        self._search = LimitSearch(most=most)
        self._answers = self._tokens = 0
        #: the same figures, for people.
        self.meter = Meter()
        slots.limit = self._search.limit

    def learn(self, size: ServerSize) -> None:
        """Take in what a server can run; one of the size that is known keeps what was found."""
        if size == self._size:
            return
        self._size = size
        self._search.begin(size.start(self._most), size.most(self._most))
        self._slots.limit = self._search.limit

    @property
    def size(self) -> ServerSize:
        """What the server can run, by its own account."""
        return self._size

    def note_tokens(self, tokens: int) -> None:
        """Count one answer that has arrived, with its generated tokens."""
        self._answers += 1
        self._tokens += tokens
        self.meter.note_tokens(tokens)

    async def run(self, loads: Loads) -> None:
        """Look at the server once a second while it has requests, until cancelled.

        A server that does not tell its load is judged by its answers alone.
        """
        try:
            await self._look_on(loads)
        finally:
            self.meter.clear()

    async def _look_on(self, loads: Loads) -> None:
        ask: Loads | None = loads
        self._search.forget()
        while True:
            await self._slots.wait_busy()
            self._take_counts()
            began = self._clock()
            while self._slots.in_flight:
                await asyncio.sleep(self._look_s)
                load = None
                try:
                    load = read_load(await ask()) if ask is not None else None
                except EngineRejected as error:
                    log.info("engine_tells_no_load", engine=self._engine, detail=str(error))
                    ask = None
                except EngineError as error:
                    # the next look may succeed; what the failure means, the probes find out
                    log.debug("engine_load_unknown", engine=self._engine, detail=str(error))
                self.meter.note_load(load)
                now = self._clock()
                self._apply(now - began, load)
                began = now
            self.meter.clear()
            self._search.forget()
            self._slots.limit = self._search.limit

    def _apply(self, elapsed_s: float, load: Load | None) -> None:
        full, answers, tokens = self._take_counts()
        limit = self._search.look(
            Reading(
                elapsed_s=elapsed_s,
                in_flight=self._slots.in_flight,
                full=full,
                answers=answers,
                tokens=tokens,
                load=load,
            )
        )
        if limit != self._slots.limit:
            log.debug("engine_limit", engine=self._engine, limit=limit, before=self._slots.limit)
            self._slots.limit = limit

    def _take_counts(self) -> tuple[bool, int, int]:
        counts = (self._slots.take_was_full(), self._answers, self._tokens)
        self._answers = self._tokens = 0
        return counts


def read_load(answer: Mapping[str, Any]) -> Load | None:
    """Read what /v1/loads says of all data parallel ranks; None when that is not understood."""
    ranks = answer.get("loads")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(r, dict) for r in ranks):
        return None
    queues = [rank["queues"] for rank in ranks if isinstance(rank.get("queues"), dict)]
    running = _numbers(ranks, "num_running_reqs")
    waiting = _numbers(ranks, "num_waiting_reqs")
    usage = _numbers(ranks, "token_usage")
    if not running or not waiting or not usage:
        return None
    return Load(
        running=int(sum(running)),
        waiting=int(sum(waiting)),
        token_usage=max(usage),
        retracted=int(sum(_numbers(queues, "retracted"))),
        # 0 while it works: no metrics, or nothing measured yet
        tokens_per_s=sum(_numbers(ranks, "gen_throughput")) or None,
    )


def _numbers(tables: list[dict[str, Any]], key: str) -> list[float]:
    values = [table.get(key) for table in tables]
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v >= 0]
