"""How many engines load their program at a time: more than the machine has cores for only thrash.

Importing SGLang and torch keeps a core busy for many seconds, in each process of a server. One
after the other, the first engines are up (and work) while the last ones are still at it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger(__name__)

#: a server that has not answered by then is at something else: weights, graphs, kernels.
HOLD_S = 60.0


class StartGate:
    """Lets ``places`` engines at a time load their program; the default is no limit.

    First starts wait for first starts only, and later ones for later ones: an engine that died in
    the middle of a point is never behind one that nobody has seen yet.
    """

    def __init__(self, places: int = sys.maxsize) -> None:
        self._first = asyncio.Semaphore(places)
        self._again = asyncio.Semaphore(places)

    @asynccontextmanager
    async def place(self, engine: str, *, again: bool) -> AsyncIterator[Place]:
        """Wait for a place; the block has it until it leaves, or ends, or HOLD_S have passed.

        So that wait is bounded, by HOLD_S for each engine in front.
        """
        gate = self._again if again else self._first
        if gate.locked():
            log.info("engine_waits_for_starts", engine=engine)
        await gate.acquire()
        place = Place(gate)
        try:
            yield place
        finally:
            place.leave()


class Place:
    """The right to load a program now."""

    def __init__(self, gate: asyncio.Semaphore) -> None:
        self._gate = gate
        self._is_left = False
        self._timer = asyncio.get_running_loop().call_later(HOLD_S, self.leave)

    def leave(self) -> None:
        """Let the next one in; may be called again."""
        if not self._is_left:
            self._is_left = True
            self._timer.cancel()
            self._gate.release()


def places_for(processes: int) -> int:
    """Return how many engines may load at once, each in ``processes`` of its own.

    One more than there are cores for: a start also waits, for its disk and its first token.
    """
    return len(os.sched_getaffinity(0)) // processes + 1
