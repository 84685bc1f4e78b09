"""What one engine does at the moment, for people who watch: it decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from evald.engines.limit_search import Load

#: tokens are averaged over at most that long, and over one second at least.
WINDOW_S = 20.0
_LEAST_S = 1.0
#: a server's account that is older tells nothing.
STALE_S = 5.0


class Meter:
    """Averages generated tokens, and keeps the server's newest account of its load.

    ``clock``: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: (second, tokens that came in it), oldest first.
        self._seconds: deque[tuple[float, int]] = deque()
        #: when counting began; None: nothing has come yet.
        self._began_s: float | None = None
        self._load: Load | None = None
        self._load_s = -float("inf")

    def note_tokens(self, tokens: int) -> None:
        """Count the tokens of an answer that has arrived.

        The first answer only starts the clock: nobody knows how long its tokens took.
        """
        now_s = self._clock()
        self._prune(now_s)
        if self._began_s is None:
            self._began_s = now_s
        elif self._seconds and self._seconds[-1][0] == (second := float(int(now_s))):
            self._seconds[-1] = (second, self._seconds[-1][1] + tokens)
        else:
            self._seconds.append((float(int(now_s)), tokens))

    def note_load(self, load: Load | None) -> None:
        """Keep what the server has just told of itself; None: it told nothing."""
        self._load, self._load_s = load, self._clock()

    def clear(self) -> None:
        """Forget everything: the engine is idle."""
        self._seconds.clear()
        self._began_s = self._load = None

    @property
    def load(self) -> Load | None:
        """The server's account; None when there is no fresh one."""
        return self._load if self._clock() - self._load_s <= STALE_S else None

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the answers that have arrived, else the server's own; None: nobody knows."""
        now_s = self._clock()
        self._prune(now_s)
        elapsed_s = 0.0 if self._began_s is None else min(now_s - self._began_s, WINDOW_S)
        if self._seconds and elapsed_s >= _LEAST_S:
            return sum(tokens for _, tokens in self._seconds) / elapsed_s
        return None if self.load is None else self.load.tokens_per_s

    def _prune(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - WINDOW_S:
            self._seconds.popleft()
            if not self._seconds:  # a long silence: the next answer is a first one again
                self._began_s = None
