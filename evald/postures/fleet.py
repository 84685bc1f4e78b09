"""The fleet posture: evald launches and owns the engines of this node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from evald.config import Fleet
from evald.engines.engine import Engine, Order
from evald.engines.launcher import Launcher
from evald.engines.leftovers import reap_leftovers
from evald.engines.pin import Checksums, PinFailed, Proof
from evald.engines.sglang_launcher import SGLangLauncher
from evald.engines.state import State
from evald.errors import EvaldError, GenerationFailed, SnapshotGone, Unhealthy
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation, Pin, PinTarget
from evald.postures.routing import Router
from evald.status.view import EngineView

log = structlog.get_logger(__name__)

#: makes the launcher of engine number ``index`` (from 0), called ``name``.
LauncherFactory = Callable[[str, int], Launcher]

#: without a change, the fleet looks again this often.
_LOOK_AGAIN_S = 1.0


class FleetPosture:
    """Fulfils ``Posture`` with ``config.engines`` engines (0 is allowed: then nothing is served).

    ``launcher_factory`` replaces SGLang, in tests.
    """

    def __init__(
        self,
        config: Fleet,
        *,
        results_dir: Path,
        launcher_factory: LauncherFactory | None = None,
    ) -> None:
        self._logs = results_dir / "engines"
        if launcher_factory is None:
            launcher_factory = _sglang_launchers(config, self._logs)
        self._config = config
        self._changes = Changes()
        self._campaign: Campaign | None = None
        #: runs of which a snapshot was verified: their next one goes to all engines at once.
        self._proven_runs: set[str] = set()
        checksums = Checksums()
        self._engines = [
            Engine(name, launcher_factory(name, index), config, checksums=checksums, events=self)
            for index, name in enumerate(f"engine-{i}" for i in range(config.engines or 0))
        ]
        self._router = Router(self._engines, self._changes, alive_timeout_s=config.alive_timeout_s)

    # --- the contract ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled; raises EvaldError when all engines are quarantined."""
        await asyncio.to_thread(reap_leftovers, self._logs)
        if not self._engines:
            await asyncio.Event().wait()  # until cancelled: there is nothing to supervise
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(engine.run(), name=engine.name)
        details = "; ".join(f"{view.name}: {view.detail}" for view in self.engines())
        raise EvaldError(
            f"cannot go on: all {len(self._engines)} engines are quarantined ({details}); "
            "repair the cause and restart evald"
        )

    async def pin(self, target: PinTarget) -> Pin:
        """Load ``target``; return when the first engine has proven it.

        Raises PinViolation, Unhealthy or SnapshotGone.
        """
        if self._campaign is not None:
            log.warning("pin_replaced", old=str(self._campaign.order.target.directory))
            self._campaign.closed = True
        campaign = Campaign(
            target,
            attempts=self._config.pin_attempts,
            scouting=target.run not in self._proven_runs,
        )
        self._campaign = campaign
        self.changed()
        try:
            await self._until_verified(campaign)
        except BaseException:
            # nobody will unpin what was never pinned
            self._close(campaign)
            raise
        self._proven_runs.add(target.run)
        campaign.pin.sglang_version = self._sglang_version()
        return campaign.pin

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question on engines of the pin; see ``Posture.generate``."""
        campaign = self._campaign
        if campaign is None or campaign.pin is not pin:
            raise GenerationFailed("error", "the point has ended")
        return await self._router.generate(campaign, request)

    async def unpin(self, pin: Pin) -> None:
        """End the point; engines keep its weights until the next pin."""
        if self._campaign is not None and self._campaign.pin is pin:
            self._close(self._campaign)

    def capacity(self) -> int:
        """Count samples worth having in flight over all engines of the pin (at least 1)."""
        campaign = self._campaign
        serving = [e for e in self._engines if campaign is not None and e.serves(campaign.order)]
        return max(1, sum(engine.slots.limit for engine in serving))

    def engines(self) -> list[EngineView]:
        """State of each engine."""
        return [engine.view() for engine in self._engines]

    def _sglang_version(self) -> str:
        """Tell the version of SGLang by the engines' own account."""
        return ", ".join(sorted({e.sglang_version for e in self._engines if e.sglang_version}))

    # --- what engines tell (engine.Events) -------------------------------------------------------

    def changed(self) -> None:
        """Take in a change of state: give orders, wake who waits."""
        self._give_orders()
        if self._campaign is not None:
            self._campaign.note_serving(self._engines)
        self._changes.notify()

    def capacity_freed(self) -> None:
        """Wake requests that wait for room."""
        self._changes.notify()

    def pinned(self, engine: Engine, order: Order, proof: Proof) -> None:
        """Take in a proven engine."""
        campaign = self._campaign
        if campaign is not None and campaign.order is order:
            campaign.add_proof(engine.name, proof)
        self.changed()

    def pin_failed(self, engine: Engine, order: Order, error: PinFailed | SnapshotGone) -> bool:
        """Take in a failed attempt; True when the engine is at fault."""
        campaign = self._campaign
        if campaign is None or campaign.order is not order:
            return False
        own_fault = campaign.add_failure(engine.name, error)
        self.changed()
        return own_fault

    # --- pinning ---------------------------------------------------------------------------------

    async def _until_verified(self, campaign: Campaign) -> None:
        dead_since = time.monotonic()
        while True:
            ticket = self._changes.ticket()
            if campaign.verified:
                return
            if campaign.gone is not None:
                raise campaign.gone
            violation = campaign.verdict(self._engines)
            if violation is not None:
                raise violation
            now = time.monotonic()
            if any(engine.alive for engine in self._engines):
                dead_since = now
            self._raise_when_dead(now - dead_since)
            await self._changes.wait(ticket, _LOOK_AGAIN_S)

    def _raise_when_dead(self, dead_s: float) -> None:
        """Raise Unhealthy when no engine has been alive for too long."""
        usable = [e for e in self._engines if e.state is not State.QUARANTINED]
        if not usable:
            cause = "all are quarantined" if self._engines else "the fleet has none"
            raise Unhealthy(f"cannot pin: no engine is left, {cause}")
        first_start = any(e.state is State.STARTING and not e.was_ready for e in usable)
        limit_s = self._config.alive_timeout_s
        if first_start:
            limit_s = max(limit_s, self._config.start_timeout_s)
        if dead_s > limit_s:
            states = ", ".join(f"{e.name} {e.state}: {e.view().detail}" for e in usable)
            raise Unhealthy(f"cannot pin: no engine was alive for {limit_s:g} s ({states})")

    def _give_orders(self) -> None:
        campaign = self._campaign
        if campaign is None or not campaign.open:
            for engine in self._engines:
                engine.give(None)
        elif campaign.scouting:
            self._send_scout(campaign)
        else:
            for engine in self._engines:
                engine.give(campaign.order)

    def _send_scout(self, campaign: Campaign) -> None:
        """Keep exactly one engine trying: one that has not failed yet, where there is one."""
        alive = [engine for engine in self._engines if engine.alive]
        scouts = [engine for engine in alive if engine.order is campaign.order]
        if not scouts and alive:
            scouts = sorted(alive, key=lambda engine: campaign.has_failed(engine.name))[:1]
        for engine in self._engines:
            engine.give(campaign.order if engine in scouts else None)

    def _close(self, campaign: Campaign) -> None:
        campaign.closed = True
        if self._campaign is campaign:
            self._campaign = None
        self.changed()


def _sglang_launchers(config: Fleet, logs: Path) -> LauncherFactory:
    def make(name: str, index: int) -> Launcher:
        return SGLangLauncher(name, index, config, logs)

    return make
