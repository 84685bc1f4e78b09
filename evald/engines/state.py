"""The state of one engine: who may follow whom, and when a failed engine may start again."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable

import structlog

from evald.errors import EvaldError

log = structlog.get_logger(__name__)


class State(enum.StrEnum):
    """What an engine is doing."""

    #: no process: none is wanted, or the next one starts at once.
    STOPPED = "stopped"
    #: process launched, no token generated yet.
    STARTING = "starting"
    #: healthy, on the base model's weights.
    READY = "ready"
    #: loading and proving a snapshot.
    PINNING = "pinning"
    #: answers requests, on proven weights.
    SERVING = "serving"
    #: admission stopped, running requests finish before the next pin.
    DRAINING = "draining"
    #: process died or probes failed; being taken down.
    UNHEALTHY = "unhealthy"
    #: an update failed: the weights are unknown, the process must go.
    TAINTED = "tainted"
    #: waits before the next start.
    BACKOFF = "backoff"
    #: failed too often; stays down until an operator releases it, or the daemon restarts.
    QUARANTINED = "quarantined"


#: states with a process that answered a health probe and is not known to be bad.
ALIVE = frozenset({State.READY, State.PINNING, State.SERVING, State.DRAINING})

_DOWN = {State.UNHEALTHY, State.STOPPED}
ALLOWED: dict[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.READY, *_DOWN}),
    State.READY: frozenset({State.PINNING, *_DOWN}),
    State.PINNING: frozenset({State.SERVING, State.TAINTED, *_DOWN}),
    State.SERVING: frozenset({State.DRAINING, *_DOWN}),
    # back to ready: where evald does not load, a point ends and the weights stay
    State.DRAINING: frozenset({State.PINNING, State.READY, *_DOWN}),
    State.UNHEALTHY: frozenset({State.BACKOFF, State.QUARANTINED, State.STOPPED}),
    State.TAINTED: frozenset({State.BACKOFF, State.QUARANTINED, State.STOPPED}),
    State.BACKOFF: frozenset({State.STARTING, State.STOPPED}),
    State.QUARANTINED: frozenset({State.STOPPED}),
}


class IllegalTransition(EvaldError):
    """A bug: this state cannot follow that one."""


class StateMachine:
    """Holds the state; ``transition`` is its only writer.

    ``generation`` grows with each change: whoever acts later (a timer, a callback) passes the
    generation that it was started in, and is ignored when the engine has moved on since.
    """

    def __init__(
        self,
        name: str,
        *,
        on_change: Callable[[State], None] = lambda _state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state = State.STOPPED
        self.detail = ""
        self.generation = 0
        self._on_change = on_change
        self._clock = clock
        self.since = clock()

    def transition(self, to: State, detail: str = "", *, generation: int | None = None) -> bool:
        """Change the state; False when ``generation`` is stale. Raises IllegalTransition."""
        if generation is not None and generation != self.generation:
            return False
        if to not in ALLOWED[self.state]:
            raise IllegalTransition(f"cannot move engine {self.name}: {self.state} -> {to}")
        log.info("engine_state", engine=self.name, old=self.state, new=to, detail=detail)
        self.state = to
        self.detail = detail
        self.generation += 1
        self.since = self._clock()
        self._on_change(to)
        return True


class RestartPolicy:
    """Decides after each failure how long to wait, or that it was once too often.

    Waits 1 s, doubling to 60 s, with 10 % jitter; 10 healthy minutes reset the wait; the fifth
    restart within 30 minutes is refused. Restarts blamed on a snapshot neither count nor wait.
    ``refuses = False`` is for servers that evald does not start: it only looks again, however
    often, and after 5 s at the latest.
    """

    FIRST_S = 1.0
    MAX_S = 60.0
    LOOK_AGAIN_S = 5.0
    JITTER = 0.1
    HEALTHY_S = 600.0
    WINDOW_S = 1800.0
    MAX_RESTARTS = 5

    def __init__(
        self,
        *,
        rng: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        refuses: bool = True,
    ) -> None:
        #: restarts that counted, ever.
        self.restarts = 0
        self._rng = rng
        self._clock = clock
        self._refuses = refuses
        self._recent: deque[float] = deque()
        self._doublings = 0

    def next_wait_s(self, healthy_s: float, *, blamed: bool = False) -> float | None:
        """Seconds until the next start; None: quarantine.

        ``healthy_s``: how long the engine was alive before it failed. ``blamed``: a snapshot is
        at fault. ``rng`` gives a number from 0 to 1.
        """
        if blamed:
            return 0.0
        now = self._clock()
        if healthy_s >= self.HEALTHY_S:
            self._doublings = 0
        self._recent.append(now)
        while self._recent[0] <= now - self.WINDOW_S:
            self._recent.popleft()
        self.restarts += 1
        if self._refuses and len(self._recent) >= self.MAX_RESTARTS:
            return None
        # the exponent is capped by quarantine: at most MAX_RESTARTS in one window, but a slow
        # sequence of failures may go on for days
        longest_s = self.MAX_S if self._refuses else self.LOOK_AGAIN_S
        wait_s = min(self.FIRST_S * 2.0 ** min(self._doublings, 10), longest_s)
        self._doublings += 1
        return wait_s * (1.0 + self.JITTER * (2.0 * self._rng() - 1.0))

    def forgive(self) -> None:
        """Start over: somebody has repaired the cause."""
        self._recent.clear()
        self._doublings = 0
