"""How long a pin is waited for, and what ends the wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

from evald.config import EngineLimits
from evald.engines.engine import Engine
from evald.engines.pin import expected_version
from evald.engines.state import State
from evald.errors import PinViolation, Unhealthy
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.front import Front
from evald.postures.rules import Rules

#: without a change, the engines are looked at this often.
LOOK_AGAIN_S = 1.0


class PinWait:
    """Waits until ``engines`` serve a point."""

    def __init__(
        self,
        engines: Sequence[Engine],
        limits: EngineLimits,
        rules: Rules,
        *,
        front: Front | None,
        changes: Changes,
    ) -> None:
        self._engines = engines
        self._limits = limits
        self._rules = rules
        self._front = front
        self._changes = changes

    async def until_served(self, campaign: Campaign) -> None:
        """Return when enough engines serve ``campaign``; raises what ``Engines.pin`` raises."""
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
            at_work = [e for e in self._engines if e.at_work]
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
