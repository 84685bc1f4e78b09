"""A pool of engines: what the postures with engines have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from evald.config import EngineLimits
from evald.engines.api import EngineError
from evald.engines.engine import Engine, Order, Upkeep
from evald.engines.launcher import Launcher
from evald.engines.pin import PinFailed, Proof, expected_version, served_version
from evald.engines.state import State
from evald.engines.supervision import Supervisor
from evald.errors import (
    EvaldError,
    GenerationFailed,
    SnapshotGone,
    Unhealthy,
    VersionChanged,
)
from evald.point import PinTarget
from evald.postures.campaign import Campaign
from evald.postures.campaigns import Campaigns
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.postures.front import Front
from evald.postures.lane import Lane
from evald.postures.pin_wait import LOOK_AGAIN_S, PinWait
from evald.postures.routing import Router
from evald.postures.rules import Rules
from evald.pulse import Pulse
from evald.status.view import EngineView

log = structlog.get_logger(__name__)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a pool, and where its server comes from."""

    name: str
    launcher: Launcher
    upkeep: Upkeep


class EnginePool:
    """Fulfils ``Engines`` with ``members`` (none is allowed: then nothing is served).

    ``front``: all requests go through it instead of to the engines themselves.
    """

    def __init__(
        self,
        members: Sequence[Member],
        limits: EngineLimits,
        rules: Rules,
        *,
        front: Front | None = None,
    ) -> None:
        self._limits = limits
        self._rules = rules
        self._front = front
        self._changes = Changes()
        #: runs of which a snapshot was verified: their next one goes to all engines at once.
        self._proven_runs: set[str] = set()
        self._all_quarantined = asyncio.Event()
        self._engines: list[Engine] = []
        self._lanes: Sequence[Lane] = self._engines if front is None else [front]
        self._router = Router(
            self._lanes,
            self._engines,
            self._changes,
            alive_timeout_s=limits.alive_timeout_s,
            loads=rules.loads,
        )
        self._campaigns = Campaigns(
            self._engines,
            rolling=rules.rolling,
            mover=self._router if rules.consolidate else None,
        )
        self._pin_wait = PinWait(self._engines, limits, rules, front=front, changes=self._changes)
        self._engines += [
            Engine(member.name, limits, member.upkeep, events=self) for member in members
        ]
        self._supervisors = [
            Supervisor(engine, member.launcher)
            for engine, member in zip(self._engines, members, strict=True)
        ]
        if front is not None:
            front.stand_before(
                self._engines,
                self._changes,
                most=limits.max_requests,
                on_grown=self.capacity_grown,
            )

    # --- the contract ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled; raises EvaldError when all engines are quarantined."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(supervisor.run(), name=engine.name)
                for engine, supervisor in zip(self._engines, self._supervisors, strict=True)
            ]
            if self._front is not None:
                tasks.append(group.create_task(self._front.run(), name="router"))
            if self._rules.consolidate:
                tasks.append(group.create_task(self._campaigns.run(), name="consolidation"))
            await self._all_quarantined.wait()
            for task in tasks:
                task.cancel()
        details = "; ".join(f"{view.name}: {view.detail}" for view in self.engines())
        raise EvaldError(
            f"cannot go on: all {len(self._engines)} engines are quarantined ({details}); "
            "repair the cause and restart evald"
        )

    async def pin(self, target: PinTarget) -> Pin:
        """Load ``target``, or verify it; return when enough engines serve it.

        Engines that earlier points still need stay with them, if points roll; else those end.
        Raises PinViolation, Unhealthy, SnapshotGone or VersionChanged.
        """
        for old in () if self._rules.rolling else self._campaigns:
            log.warning("pin_replaced", old=old.order.name)
            self._campaigns.close(old)
        campaign = Campaign(
            target,
            attempts=self._limits.pin_attempts,
            scouting=self._rules.loads and target.run not in self._proven_runs,
            on_need=self._campaigns.look,
        )
        self._campaigns.add(campaign)
        self.changed()
        try:
            await self._pin_wait.until_served(campaign)
        except BaseException:
            # nobody will unpin what was never pinned
            self._close(campaign)
            raise
        self._proven_runs.add(target.run)
        campaign.pin.sglang_version = self._sglang_version()
        return campaign.pin

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question on engines of the pin; see ``Engines.generate``."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is None:
            raise GenerationFailed("error", "the point has ended")
        return await self._router.generate(campaign, request)

    async def confirm(self, pin: Pin) -> None:
        """Read every version once more, where evald does not load; raises VersionChanged.

        Where it does, every single answer has shown it.
        """
        campaign = self._campaigns.of_pin(pin)
        if campaign is None:
            raise VersionChanged("the point has ended before its weights were confirmed")
        if campaign.failure is not None:
            raise campaign.failure
        if not self._rules.loads:
            expected = expected_version(pin.target)
            # the answers of an engine that is lost have been checked one by one
            every = self._rules.all_engines
            engines = [e for e in self._engines if every or e.serves(campaign.order)]
            await asyncio.gather(*[self._confirm(engine, expected) for engine in engines])

    async def unpin(self, pin: Pin) -> None:
        """End the point; engines keep its weights until the next pin."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is not None:
            self._close(campaign)

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word; raises EvaldError."""
        self._named("restart", engine).restart()

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine; raises EvaldError."""
        self._named("release", engine).release()

    def capacity(self, pin: Pin) -> int:
        """Count samples worth having in flight over all engines of the pin (at least 1)."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is None:
            return 1
        order = campaign.order
        return max(1, sum([lane.slots.limit for lane in self._lanes if lane.serves(order)]))

    def when_room(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call whenever the capacity may have grown, until the point's end."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is not None:
            campaign.when_room(call)

    def left(self, pin: Pin, samples: int) -> None:
        """Take in how many samples of a point have no answer, since all are handed over."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is not None and campaign.note_left(samples) and self._rules.rolling:
            self._campaigns.look()

    def when_spare(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call as soon as an engine is to be had beyond this point; never if points do not roll."""
        campaign = self._campaigns.of_pin(pin)
        if campaign is not None:
            campaign.when_spare(call)

    def engines(self) -> list[EngineView]:
        """State of each engine."""
        return [engine.view() for engine in self._engines]

    def pulses(self) -> list[Pulse]:
        """Return the pulse of each engine's task."""
        return [engine.pulse for engine in self._engines]

    def _sglang_version(self) -> str:
        """Tell the version of SGLang by the engines' own account."""
        return ", ".join(sorted({e.sglang_version for e in self._engines if e.sglang_version}))

    def _named(self, verb: str, name: str) -> Engine:
        for engine in self._engines:
            if engine.name == name:
                return engine
        names = ", ".join(engine.name for engine in self._engines) or "(none)"
        raise EvaldError(
            f"cannot {verb} engine {name!r}: there is no such engine; there are {names}"
        )

    # --- what engines tell (engine.Events) -------------------------------------------------------

    def changed(self) -> None:
        """Take in a change of state: give orders, wake who waits."""
        self._campaigns.look()
        if self._front is not None:
            self._front.look(self._campaigns.newest)
        if self._engines and all(e.state is State.QUARANTINED for e in self._engines):
            self._all_quarantined.set()
        self._changes.notify()
        self.capacity_grown()

    def capacity_freed(self) -> None:
        """Wake requests that wait for room."""
        self._changes.notify()

    def capacity_grown(self) -> None:
        """Wake who hands over questions."""
        for campaign in self._campaigns:
            campaign.tell_room()

    def emptied(self) -> None:
        """Let an engine go where it is of use."""
        if any(campaign.left is not None for campaign in self._campaigns):
            # (once its last answer is taken in: until then it counts as one that is missing)
            asyncio.get_running_loop().call_soon(self._campaigns.look)

    def pinned(self, engine: Engine, order: Order, proof: Proof) -> None:
        """Take in a proven engine."""
        campaign = self._campaigns.of_order(order)
        if campaign is not None:
            campaign.add_proof(engine.name, proof)
        self.changed()

    def pin_failed(self, engine: Engine, order: Order, error: PinFailed | SnapshotGone) -> bool:
        """Take in a failed attempt; True when the engine is at fault."""
        campaign = self._campaigns.of_order(order)
        if campaign is None:
            return False
        others = (one for one in self._engines if one is not engine)
        served = any(one.serves(order) or one.pinning is order for one in others)
        own_fault = campaign.add_failure(engine.name, error, served=served)
        self.changed()
        return own_fault

    def other_version(self, engine: Engine, order: Order, served: str | None) -> None:
        """Take in that an engine serves other weights than those that the point is about."""
        campaign = self._campaigns.of_order(order)
        if campaign is None:
            return
        campaign.others[engine.name] = served
        if self._rules.frozen:
            campaign.fail(
                VersionChanged(
                    f"engine {engine.name} serves weight version {served!r}, not "
                    f"{expected_version(order.target)!r}; nothing was measured on it"
                )
            )
            self.changed()

    def _close(self, campaign: Campaign) -> None:
        self._campaigns.close(campaign)
        self.changed()

    async def _confirm(self, engine: Engine, expected: str) -> None:
        """Read one engine's version again; one that is lost is a failure only if all are needed."""
        trouble = ""
        try:
            async with asyncio.timeout(self._limits.probe_timeout_s):
                while True:
                    try:
                        served = await served_version(engine.connected_api())
                        break
                    except EngineError as error:
                        trouble = str(error)
                        if not self._rules.all_engines:
                            return
                        await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError as error:
            raise Unhealthy(
                f"cannot confirm that engine {engine.name} still serves {expected!r}: {trouble}"
            ) from error
        if served != expected:
            raise VersionChanged(
                f"engine {engine.name} serves weight version {served!r} after the last answer, "
                f"not {expected!r}: somebody loaded others while the point ran"
            )
