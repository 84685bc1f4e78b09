"""The pulse of a loop that must never stand still: it gets on, or says what it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Pulse:
    """One loop marks its progress here; a watchdog looks. May be used from any thread.

    A new pulse rests: it is expected of nobody to get on before the loop has begun.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        #: what it does, since when, and for how long it may (None: as long as the watchdog says).
        self._mark: tuple[str, float, float | None] = ("has not begun", clock(), math.inf)

    def beat(self) -> None:
        """Mark progress; the next mark must come within what the watchdog allows."""
        self._mark = ("gets on", self._clock(), None)

    def rest(self, doing: str, limit_s: float = math.inf) -> None:
        """Mark progress, and say that the next mark may take up to ``limit_s``."""
        self._mark = (doing, self._clock(), limit_s)

    def begin_again(self) -> None:
        """Count from now: it was not the loop's fault that it stood still."""
        doing, _, limit_s = self._mark
        self._mark = (doing, self._clock(), limit_s)

    def overdue(self, within_s: float) -> str:
        """Say what it has done for too long; empty while it is well. ``within_s``: see ``beat``."""
        doing, since, limit_s = self._mark
        took_s = self._clock() - since
        if took_s <= (within_s if limit_s is None else limit_s):
            return ""
        return f"{self.name}: {doing!r} since {took_s:.0f} s"
