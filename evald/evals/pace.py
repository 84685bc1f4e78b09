"""How fast the samples of an eval set get done, and how long the rest takes at that pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

#: the latest samples that make the pace; fewer than the second, or less time, tell nothing.
LATEST = 512
_LEAST = 8
_LEAST_S = 1.0


class Pace:
    """Remembers when the latest samples were done. ``clock``: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done_s: deque[float] = deque(maxlen=LATEST)

    def note(self) -> None:
        """Take in that a sample is done."""
        self._done_s.append(self._clock())

    def left_s(self, n_left: int) -> float | None:
        """Estimate the seconds until ``n_left`` more are done; None: it cannot be said.

        While nothing gets done the estimate grows: the latest samples took until now.
        """
        if not n_left:
            return 0.0
        if len(self._done_s) < _LEAST:
            return None
        elapsed_s = self._clock() - self._done_s[0]
        if elapsed_s < _LEAST_S:
            return None
        # from the first of them on: when it was begun, nobody knows
        return n_left * elapsed_s / (len(self._done_s) - 1)
