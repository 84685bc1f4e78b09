"""Which engine works for which point, when several are under way: a pure function.

The oldest point goes first. While it has questions to hand over it uses every engine. Then only its
answers under way are left, and each engine that has none of them is of use to the next point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one point can make use of."""

    #: it has questions to hand over: every engine is of use.
    feeds: bool
    #: when all are handed over: samples without an answer, wherever they are.
    samples: int = 0
    #: samples that wait for room on an engine.
    waiting: int = 0
    #: engines can still come to it; false: those that serve it are all.
    joinable: bool = True


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine is."""

    #: it can work, now or after a pin.
    alive: bool
    #: number of the point that it serves or is on its way to; None: of none that is under way.
    at: int | None = None
    #: it serves it.
    arrived: bool = False
    #: samples that it answers (of another point while it is on its way), and those that it may.
    in_flight: int = 0
    limit: int = 1


#: a point that nobody has pinned yet.
NEXT = Need(feeds=True)


def assign(needs: Sequence[Need], seats: Sequence[Seat]) -> list[int | None]:
    """Give each engine the number of its point; ``needs`` are those of the points, oldest first.

    Engines stay where they are while nobody needs them elsewhere, and one that is on its way is
    turned around only for an older point that would have none.
    """
    return _Assignment(needs, seats).result()


def can_spare(needs: Sequence[Need], seats: Sequence[Seat]) -> bool:
    """Tell whether an engine is to be had beyond these points."""
    numbers = assign([*needs, NEXT], seats)
    return any(n == len(needs) and seat.alive for n, seat in zip(numbers, seats, strict=True))


class _Assignment:
    """The work of ``assign``."""

    def __init__(self, needs: Sequence[Need], seats: Sequence[Seat]) -> None:
        self._needs = needs
        self._seats = seats
        self._at = [seat.at for seat in seats]
        limits = [seat.limit for seat in seats if seat.alive]
        self._limit = max(1.0, sum(limits) / len(limits)) if limits else 1.0
        #: engines that whoever needs them may take.
        self._free = [i for i, at in enumerate(self._at) if at is None]
        for number in range(len(needs)):
            self._free += self._spare_of(number)

    def result(self) -> list[int | None]:
        """Serve the points in their order."""
        for number, need in enumerate(self._needs):
            if not need.joinable:
                continue
            if need.feeds:
                younger = [i for i, at in enumerate(self._at) if at is not None and at > number]
                self._take(number, [*self._free, *younger])
                return self._at
            if need.samples:
                self._fill_up(number)
        self._place_the_idle()
        return self._at

    def _spare_of(self, number: int) -> list[int]:
        """Give the engines that a point does not need."""
        need = self._needs[number]
        mine = self._of(number)
        if not need.joinable:
            lost = [i for i in mine if not self._seats[i].arrived]
            mine = [i for i in mine if self._seats[i].arrived]
            return lost + self._idle_of(need, mine)
        return self._idle_of(need, mine)

    def _idle_of(self, need: Need, mine: list[int]) -> list[int]:
        if need.feeds:
            return []
        if not need.samples:
            return mine
        busy = [i for i in mine if self._seats[i].arrived and self._seats[i].in_flight]
        others = [i for i in mine if i not in busy]
        others.sort(key=lambda i: (not self._seats[i].alive, not self._seats[i].arrived))
        keep = self._wanted(need, busy) - len(busy)
        return [i for n, i in enumerate(others) if n >= keep or not self._seats[i].alive]

    def _wanted(self, need: Need, busy: Sequence[int]) -> int:
        """Count the engines that a point without questions to hand over is to have.

        ``busy``: those that work for it. What is on none of them (a function thinks) may ask again.
        """
        on_them = sum(self._seats[i].in_flight for i in busy)
        room = sum(max(0, self._seats[i].limit - self._seats[i].in_flight) for i in busy)
        more = max(need.waiting, need.samples - on_them - room)
        return max(1, len(busy) + math.ceil(max(0, more) / self._limit))

    def _fill_up(self, number: int) -> None:
        """Give a point without questions to hand over what it lacks."""
        mine = [i for i in self._of(number) if i not in self._free]
        wanted = 1
        if self._needs[number].waiting:
            busy = [i for i in mine if self._seats[i].arrived and self._seats[i].in_flight]
            wanted = self._wanted(self._needs[number], busy)
        free = sorted(self._free, key=lambda i: (self._at[i] != number, self._seats[i].in_flight))
        alive = [i for i in free if self._seats[i].alive]
        self._take(number, alive[: max(0, wanted - len(mine))])
        if mine or alive:
            return
        younger = [
            i
            for i, at in enumerate(self._at)
            if at is not None and at > number and self._seats[i].alive
        ]
        # all are down: one that comes back is for the oldest
        self._take(number, sorted(younger, key=self._loss)[:1] or free[:1])

    def _loss(self, i: int) -> tuple[bool, int, bool, int]:
        """Sort engines by how much their point would lose with them."""
        at, seat = self._at[i], self._seats[i]
        return self._at.count(at) == 1, seat.in_flight, not seat.arrived, -(at or 0)

    def _place_the_idle(self) -> None:
        """Let engines stay, and those that come back help the newest point."""
        open_ = [
            number for number, need in enumerate(self._needs) if need.samples and need.joinable
        ]
        for i in self._free:
            if self._at[i] is None or not self._seats[i].alive:
                self._at[i] = open_[-1] if open_ else None

    def _take(self, number: int, those: Sequence[int]) -> None:
        for i in those:
            self._at[i] = number
        self._free = [i for i in self._free if i not in those]

    def _of(self, number: int) -> list[int]:
        return [i for i, at in enumerate(self._at) if at == number]
