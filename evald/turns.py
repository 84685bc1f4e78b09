"""The line for the engines: points take them in order of admission, one at a time."""

from __future__ import annotations

import asyncio

from evald.point import PointKey


class Turns:
    """A first-in, first-out line that can be left from any place in it."""

    def __init__(self) -> None:
        self._line: dict[PointKey, asyncio.Event] = {}

    def join(self, key: PointKey) -> asyncio.Event:
        """Take the last place; the event is set once everybody in front has left."""
        self._line[key] = asyncio.Event()
        self._call_first()
        return self._line[key]

    def leave(self, key: PointKey) -> None:
        """Give up the place, wherever in the line it is."""
        del self._line[key]
        self._call_first()

    def _call_first(self) -> None:
        for first in self._line.values():
            first.set()
            return
