"""How many samples one engine has in flight, how many it may have, and when it is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Slots:
    """Counts samples in flight; ``limit`` bounds them, but one larger request may have it alone.

    ``on_room`` is called whenever a request that did not fit could fit now, ``on_grown`` when the
    limit was raised, and ``on_idle`` when nothing is in flight any more.
    """

    def __init__(
        self,
        limit: int,
        on_room: Callable[[], None] = lambda: None,
        *,
        on_grown: Callable[[], None] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.in_flight = 0
        self._limit = limit
        #: samples of the latest request: another one is likely to be as large.
        self._count = 1
        self._was_full = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()
        self._on_room = on_room
        self._on_grown = on_grown
        self._on_idle = on_idle

    @property
    def limit(self) -> int:
        """Samples in flight that are allowed (at least 1); may change at any time."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        grown = limit > self._limit
        self._limit = limit
        self._was_full = False
        if grown:
            self._on_room()
            self._on_grown()

    def fits(self, count: int) -> bool:
        """Whether ``count`` more samples may enter now."""
        return self.in_flight == 0 or self.in_flight + count <= self._limit

    def enter(self, count: int) -> None:
        """Take ``count`` places; the caller has asked ``fits``."""
        self.in_flight += count
        self._count = count
        self._was_full = self._was_full or self._is_full()
        self._idle.clear()
        self._busy.set()

    def leave(self, count: int) -> None:
        """Give ``count`` places back."""
        self.in_flight -= count
        if self.in_flight == 0:
            self._idle.set()
            self._busy.clear()
        self._on_room()
        if self.in_flight == 0:
            self._on_idle()

    def take_was_full(self) -> bool:
        """Tell whether there has been no room for another request at any time since last asked."""
        was_full, self._was_full = self._was_full or self._is_full(), False
        return was_full

    async def wait_busy(self) -> None:
        """Wait until something is in flight."""
        await self._busy.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when ``timeout_s`` is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _is_full(self) -> bool:
        return not self.fits(self._count)
