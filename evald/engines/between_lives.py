"""Between two lives of an engine: a pause, or quarantine when there were too many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from evald.engines.engine import SLACK_S, Engine
from evald.engines.launcher import Launcher
from evald.engines.state import RestartPolicy, State

log = structlog.get_logger(__name__)


class BetweenLives:
    """Decides after each life of ``engine`` when the next one begins.

    While nothing can be written where the server's log lies (a full disk), no life is begun, and
    the one that ended over it is not held against the engine.
    """

    def __init__(self, engine: Engine, launcher: Launcher, *, rng: Callable[[], float]) -> None:
        self._engine = engine
        self._launcher = launcher
        self._policy = RestartPolicy(rng=rng, clock=engine.clock, refuses=engine.upkeep.owned)

    async def wait(self, detail: str, *, healthy_s: float, blamed: bool) -> None:
        """Wait before the next life, or for an operator if there were too many.

        ``detail``: how the last one ended; ``healthy_s``, ``blamed``: see ``RestartPolicy``.
        """
        engine = self._engine
        if not blamed and (fault := await asyncio.to_thread(self._launcher.log_fault)):
            await self._until_written(detail, fault)
            return
        wait_s = self._policy.next_wait_s(healthy_s, blamed=blamed)
        engine.restarts = self._policy.restarts
        if wait_s is not None:
            engine.machine.transition(State.BACKOFF, detail)
            await set_within(engine.recalled, wait_s)
            return
        engine.released.clear()
        engine.machine.transition(State.QUARANTINED, detail)
        log.error("engine_quarantined", engine=engine.name, detail=detail)
        await engine.released.wait()
        self._policy.forgive()
        engine.machine.transition(State.STOPPED, "released from quarantine")

    async def _until_written(self, detail: str, fault: str) -> None:
        """Wait until its log can be written, for as long as that takes, or until an operator."""
        engine = self._engine
        engine.machine.transition(State.BACKOFF, f"{fault}; before: {detail}")
        log.warning("engine_waits_for_disk", engine=engine.name, detail=fault)
        while fault and not await set_within(engine.recalled, RestartPolicy.LOOK_AGAIN_S):
            engine.pulse.rest("waits for the disk of its log", RestartPolicy.LOOK_AGAIN_S + SLACK_S)
            fault = await asyncio.to_thread(self._launcher.log_fault)


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; False when ``timeout_s`` passed without it."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
