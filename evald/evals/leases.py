"""How many samples of a point are in flight: what the engines can take right now, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

#: the capacity of the engines is looked at this often, also if nobody says that it has grown.
_LOOK_ANYWAY_S = 5.0


class Slots:
    """Samples in flight, kept within a capacity that may change at any time.

    ``look`` is to be called when the capacity may have grown. ``on_open`` hears how many samples
    have no answer, once all leases are taken and then with each answer.
    """

    def __init__(
        self, capacity: Callable[[], int], on_open: Callable[[int], None] = lambda _n: None
    ) -> None:
        self._capacity = capacity
        self._on_open = on_open
        self._used = 0
        #: of them without an answer.
        self._open = 0
        self._all_taken = False
        self._freed = asyncio.Event()

    async def take(self, count: int) -> Lease:
        """Wait until ``count`` more fit in; more than fit at all get in alone."""
        while self._used and self._used + count > self._capacity():
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_ANYWAY_S):
                    await self._freed.wait()
        self._used += count
        self._open += count
        return Lease(self, count)

    def all_taken(self) -> None:
        """Take in that nobody will take one any more."""
        self._all_taken = True
        self._on_open(self._open)

    def look(self) -> None:
        """Look at the capacity again."""
        self._freed.set()

    def answered(self, count: int) -> None:
        """Take in that samples have their answers, or never will."""
        self._open -= count
        if self._all_taken:
            self._on_open(self._open)

    def give_back(self, count: int) -> None:
        """Make room."""
        self._used -= count
        self._freed.set()


class Lease:
    """Slots that one question holds; given back once, by whoever comes first."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._count = count
        self._open = count

    def answered(self) -> None:
        """Take in that the engines have nothing more to do for it."""
        if self._open:
            self._slots.answered(self._open)
            self._open = 0

    def give_back(self, _task: object = None) -> None:
        """Give the slots back."""
        self.answered()
        if self._count:
            self._slots.give_back(self._count)
            self._count = 0
