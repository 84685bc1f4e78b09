"""How many samples of a point are in flight: what the engines can take right now, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

#: how often the capacity of the engines is looked at while all of it is in use.
_CAPACITY_CHECK_S = 0.5


class Slots:
    """Samples in flight, kept within a capacity that may change at any time."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._used = 0
        self._freed = asyncio.Event()

    async def take(self, count: int) -> Lease:
        """Wait until ``count`` more fit in; more than fit at all get in alone."""
        while self._used and self._used + count > self._capacity():
            self._freed.clear()
            # capacity that grew wakes nobody
            with suppress(TimeoutError):
                async with asyncio.timeout(_CAPACITY_CHECK_S):
                    await self._freed.wait()
        self._used += count
        return Lease(self, count)

    def give_back(self, count: int) -> None:
        """Make room."""
        self._used -= count
        self._freed.set()


class Lease:
    """Slots that one question holds; given back once, by whoever comes first."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._count = count

    def give_back(self, _task: object = None) -> None:
        """Give the slots back."""
        if self._count:
            self._slots.give_back(self._count)
            self._count = 0
