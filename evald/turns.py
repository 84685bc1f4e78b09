"""Who comes next: which run's point is started, and the line of started points for the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from evald.point import PointKey


class RunsInTurn:
    """Runs that share a root take turns, so that none waits behind another's whole queue."""

    def __init__(self) -> None:
        #: run -> number of its latest start.
        self._started: dict[str, int] = {}
        self._starts = 0

    def choose(self, queue: Iterable[PointKey]) -> PointKey:
        """Return the oldest point of the run that has waited longest; ``queue`` is not empty."""
        return min(queue, key=lambda key: self._started.get(key.run, 0))

    def start(self, run: str) -> None:
        """Note that a point of ``run`` is started."""
        self._starts += 1
        self._started[run] = self._starts


class Turns:
    """A first-in, first-out line that can be left from any place in it."""

    def __init__(self) -> None:
        self._line: dict[PointKey, asyncio.Event] = {}
        #: those that let the one behind go on beside them.
        self._shares: set[PointKey] = set()

    def join(self, key: PointKey) -> asyncio.Event:
        """Take the last place; the event is set once everybody in front has left, or shares."""
        self._line[key] = asyncio.Event()
        self._call()
        return self._line[key]

    def share(self, key: PointKey) -> None:
        """Let the next one go on beside this one, whose turn it is."""
        if key in self._line:
            self._shares.add(key)
            self._call()

    def leave(self, key: PointKey) -> None:
        """Give up the place, wherever in the line it is."""
        del self._line[key]
        self._shares.discard(key)
        self._call()

    def _call(self) -> None:
        for key, turn in self._line.items():
            turn.set()
            if key not in self._shares:
                return
