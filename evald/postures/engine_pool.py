"""A pool of engines: what the postures with engines have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

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
    PinViolation,
    SnapshotGone,
    Unhealthy,
    VersionChanged,
)
from evald.point import PinTarget
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.postures.front import Front
from evald.postures.routing import Lane, Router
from evald.pulse import Pulse
from evald.status.view import EngineView

log = structlog.get_logger(__name__)

#: without a change, the pool looks again this often.
LOOK_AGAIN_S = 1.0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a pin of the pool means."""

    #: evald loads; false: it only reads versions, and other weights end the point.
    loads: bool = True
    #: every engine must serve before the first request; false: one is enough, others join.
    all_engines: bool = False
    #: weights are what they are: an engine with others is not waited for.
    frozen: bool = False


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
        self._campaign: Campaign | None = None
        #: runs of which a snapshot was verified: their next one goes to all engines at once.
        self._proven_runs: set[str] = set()
        self._all_quarantined = asyncio.Event()
        self._engines = [
            Engine(member.name, limits, member.upkeep, events=self) for member in members
        ]
        self._supervisors = [
            Supervisor(engine, member.launcher)
            for engine, member in zip(self._engines, members, strict=True)
        ]
        if front is not None:
            front.stand_before(self._engines, self._changes, most=limits.max_requests)
        self._lanes: Sequence[Lane] = self._engines if front is None else [front]
        self._router = Router(
            self._lanes,
            self._engines,
            self._changes,
            alive_timeout_s=limits.alive_timeout_s,
            loads=rules.loads,
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

        Raises PinViolation, Unhealthy, SnapshotGone or VersionChanged.
        """
        if self._campaign is not None:
            log.warning("pin_replaced", old=self._campaign.order.name)
            self._campaign.closed = True
        campaign = Campaign(
            target,
            attempts=self._limits.pin_attempts,
            scouting=self._rules.loads and target.run not in self._proven_runs,
        )
        self._campaign = campaign
        self.changed()
        try:
            await self._until_served(campaign)
        except BaseException:
            # nobody will unpin what was never pinned
            self._close(campaign)
            raise
        self._proven_runs.add(target.run)
        campaign.pin.sglang_version = self._sglang_version()
        return campaign.pin

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question on engines of the pin; see ``Engines.generate``."""
        campaign = self._campaign
        if campaign is None or campaign.pin is not pin:
            raise GenerationFailed("error", "the point has ended")
        return await self._router.generate(campaign, request)

    async def confirm(self, pin: Pin) -> None:
        """Read every version once more, where evald does not load; raises VersionChanged.

        Where it does, every single answer has shown it.
        """
        campaign = self._campaign
        if campaign is None or campaign.pin is not pin:
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
        if self._campaign is not None and self._campaign.pin is pin:
            self._close(self._campaign)

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word; raises EvaldError."""
        self._named("restart", engine).restart()

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine; raises EvaldError."""
        self._named("release", engine).release()

    def capacity(self) -> int:
        """Count samples worth having in flight over all engines of the pin (at least 1)."""
        campaign = self._campaign
        if campaign is None:
            return 1
        serving = [lane for lane in self._lanes if lane.serves(campaign.order)]
        return max(1, sum(lane.slots.limit for lane in serving))

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
        campaign = self._campaign
        self._give_orders()
        if campaign is not None:
            campaign.note_serving(self._engines)
        if self._front is not None:
            self._front.look(campaign)
        if self._engines and all(e.state is State.QUARANTINED for e in self._engines):
            self._all_quarantined.set()
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

    def other_version(self, engine: Engine, order: Order, served: str | None) -> None:
        """Take in that an engine serves other weights than those that the point is about."""
        campaign = self._campaign
        if campaign is None or campaign.order is not order:
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

    # --- pinning ---------------------------------------------------------------------------------

    async def _until_served(self, campaign: Campaign) -> None:
        dead_since = time.monotonic()
        while True:
            ticket = self._changes.ticket()
            if campaign.failure is not None:
                raise campaign.failure
            if self._enough(campaign):
                return
            if campaign.gone is not None:
                raise campaign.gone
            violation = campaign.verdict(self._engines)
            if violation is not None:
                raise violation
            now = time.monotonic()
            at_work = [e for e in self._engines if e.alive or e.tries(campaign.order)]
            if at_work and (len(at_work) == len(self._engines) or not self._rules.all_engines):
                dead_since = now
            self._raise_when_dead(now - dead_since)
            self._raise_when_late(campaign, now)
            await self._changes.wait(ticket, LOOK_AGAIN_S)

    def _enough(self, campaign: Campaign) -> bool:
        if self._front is not None and not self._front.serves(campaign.order):
            return False
        if self._rules.all_engines:
            return all(engine.serves(campaign.order) for engine in self._engines)
        return campaign.verified

    def _raise_when_dead(self, dead_s: float) -> None:
        """Raise Unhealthy when no engine (or one that is needed) has been alive for too long."""
        usable = [e for e in self._engines if e.state is not State.QUARANTINED]
        if not usable:
            cause = "all are quarantined" if self._engines else "the fleet has none"
            raise Unhealthy(f"cannot pin: no engine is left, {cause}")
        first_start = [e for e in usable if e.state is State.STARTING and not e.was_ready]
        limit_s = self._limits.alive_timeout_s
        if first_start:
            limit_s = max(limit_s, *[e.upkeep.start_timeout_s for e in first_start])
        if dead_s > limit_s:
            down = [engine for engine in usable if not engine.alive]
            states = ", ".join(f"{e.name} {e.state}: {e.view().detail}" for e in down)
            what = "not every engine" if self._rules.all_engines else "no engine"
            raise Unhealthy(f"cannot pin: {what} was alive for {limit_s:g} s ({states})")

    def _raise_when_late(self, campaign: Campaign, now: float) -> None:
        """Raise when engines live, but do not come to the weights that were asked for."""
        alive_s, load_s = self._limits.alive_timeout_s, self._limits.load_timeout_s
        if not self._rules.loads:
            if now - campaign.began <= alive_s or not campaign.others:
                return
            served = ", ".join(f"{name}: {other!r}" for name, other in campaign.others.items())
            raise PinViolation(
                f"cannot verify weight version {expected_version(campaign.order.target)!r}: after "
                f"{alive_s:g} s engines serve others ({served}); whoever runs them must load it"
            )
        verified_at = campaign.verified_at
        if self._rules.all_engines and verified_at is not None:
            limit_s = alive_s + load_s
            if now - verified_at > limit_s:
                missing = [e for e in self._engines if not e.serves(campaign.order)]
                states = ", ".join(f"{e.name} {e.state}: {e.view().detail}" for e in missing)
                raise Unhealthy(
                    f"cannot pin: the router needs all of its engines, and {limit_s:g} s after "
                    f"the first these do not serve the snapshot: {states or 'none, but no route'}"
                )

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
        scouts = [engine for engine in self._engines if engine.tries(campaign.order)]
        if not scouts:
            alive = [engine for engine in self._engines if engine.alive]
            # nobody is: who had the order keeps it, and may start on it again; or who starts on a
            # snapshot that nobody wants any more
            able = alive or [e for e in self._engines if e.order is campaign.order]
            able = able or [engine for engine in self._engines if engine.starting_on]
            scouts = sorted(able, key=lambda engine: campaign.has_failed(engine.name))[:1]
        for engine in self._engines:
            engine.give(campaign.order if engine in scouts else None)

    def _close(self, campaign: Campaign) -> None:
        campaign.closed = True
        if self._campaign is campaign:
            self._campaign = None
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
