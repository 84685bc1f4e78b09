"""How many samples one engine has in flight, and when it is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Slots:
    """Counts samples in flight; ``limit`` bounds them, but one larger request may have it alone."""

    def __init__(self, limit: int, on_leave: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_leave = on_leave

    def fits(self, count: int) -> bool:
        """Whether ``count`` more samples may enter now."""
        return self.in_flight == 0 or self.in_flight + count <= self.limit

    def enter(self, count: int) -> None:
        """Take ``count`` places; the caller has asked ``fits``."""
        self.in_flight += count
        self._idle.clear()

    def leave(self, count: int) -> None:
        """Give ``count`` places back."""
        self.in_flight -= count
        if self.in_flight == 0:
            self._idle.set()
        self._on_leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when ``timeout_s`` is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
