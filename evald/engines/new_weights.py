"""How an engine comes to the weights of its order: drained, loaded and proven; or only verified."""

from __future__ import annotations

import msgspec
import structlog

from evald.engines.api import EngineAPI, EngineError
from evald.engines.between_lives import set_within
from evald.engines.engine import Engine, Order
from evald.engines.launcher import Boot, Launched
from evald.engines.pin import (
    Loading,
    PinFailed,
    Proof,
    drain,
    expected_version,
    is_gone,
    new_weight_version,
    served_version,
)
from evald.engines.readiness import with_death
from evald.engines.state import State
from evald.errors import SnapshotGone

log = structlog.get_logger(__name__)

#: between two looks at a server that has not come to the wanted weights yet.
VERSION_POLL_S = 0.2


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why one life of the server ended; STOPPED: as planned, the next one may begin."""

    state: State
    detail: str
    blamed: bool = False


def ended(engine: Engine, state: State, detail: str, *, blamed: bool = False) -> Ending:
    """End the life of an engine's server, which has no known weights any more."""
    engine.pinned = engine.pinning = engine.weight_version = None
    engine.machine.transition(state, detail)
    return Ending(state=state, detail=detail, blamed=blamed)


class NewWeights:
    """Brings ``engine`` to one order after another, in every life of its server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._upkeep = engine.upkeep
        #: of the server: engines of one layout have equal checksums for equal weights.
        self.layout = ""
        #: the order that the server was started on, and with which version.
        self._booted: tuple[Order, str] | None = None

    async def plan(self) -> Boot | None:
        """Decide what to start the server on: the order's snapshot, or (None) the base model."""
        engine = self._engine
        order, self._booted = engine.order, None
        if order is None or order.target.directory is None or not self._upkeep.mode.restart:
            engine.pinning = None
            return None
        if await is_gone(order.target.directory):
            engine.pinning = None
            self._report_gone(order)
            return None
        version = new_weight_version(order.target)
        self._booted, engine.pinning = (order, version), order
        return Boot(directory=order.target.directory, weight_version=version)

    async def take(self, api: EngineAPI, launched: Launched, order: Order) -> Ending | None:
        """Come to serve ``order``, one step nearer; what ended the life, or None."""
        loading = self._upkeep.loading
        if loading is None:
            return await self._verify(api, order)
        if await is_gone(order.target.directory):
            self._report_gone(order)
            return None
        engine = self._engine
        engine.pinning = order
        engine.weight_version = engine.pinned = None
        if engine.state is State.SERVING:
            engine.machine.transition(State.DRAINING)
        try:
            timeout_s = engine.limits.drain_timeout_s
            await drain(api, engine.slots, timeout_s, owned=self._upkeep.owned)
        except PinFailed as error:
            engine.pinning = None
            engine.events.pin_failed(engine, order, error)
            return ended(engine, State.UNHEALTHY, str(error))
        leak = loading.fast.leaking(api) if self._upkeep.owned else ""
        if leak or (self._upkeep.mode.restart and self._booted_version(order) is None):
            # still on its way to the order: nobody else needs to try meanwhile
            detail = f"starts again on {order.name}" if not leak else f"starts again: {leak}"
            engine.machine.transition(State.STOPPED, detail)
            return Ending(state=State.STOPPED, detail=detail)
        return await self._pin(api, launched, order, loading)

    async def _pin(
        self, api: EngineAPI, launched: Launched, order: Order, loading: Loading
    ) -> Ending | None:
        """Load ``order``, unless the server was started on it, and prove it."""
        engine, target = self._engine, order.target
        engine.machine.transition(State.PINNING, order.name)
        try:
            version, loaded = self._booted_version(order), None
            if version is None:
                version = new_weight_version(target)
                loaded = await loading.load(api, target, version)
            proof = await loading.prove(
                api, target.digest, version, engine=engine.name, layout=self.layout, loaded=loaded
            )
        except PinFailed as error:
            return await self.failed(order, await with_death(launched, error))
        self._serve_from_now(order, proof)
        if loaded is not None:
            await loading.fast.worked(api, target.digest, loaded, engine=engine.name)
        return None

    def _booted_version(self, order: Order) -> str | None:
        """Return with which version the server was started on ``order``; None: it was not."""
        return self._booted[1] if self._booted is not None and self._booted[0] is order else None

    async def _verify(self, api: EngineAPI, order: Order) -> Ending | None:
        """Look whether the server has come to the weights of ``order`` by itself."""
        engine = self._engine
        if engine.state is State.SERVING:
            engine.pinned = engine.weight_version = None
            engine.machine.transition(State.DRAINING)
            engine.machine.transition(State.READY)
        try:
            served = await served_version(api)
        except EngineError as error:
            return ended(engine, State.UNHEALTHY, str(error))
        expected = expected_version(order.target)
        if served == expected:
            engine.machine.transition(State.PINNING, order.name)
            self._serve_from_now(order, Proof(weight_version=expected, checksum=None))
        else:
            engine.events.other_version(engine, order, served)
            await set_within(engine.woken, VERSION_POLL_S)
        return None

    def _serve_from_now(self, order: Order, proof: Proof) -> None:
        engine = self._engine
        engine.pinning = None
        engine.pinned = order
        engine.weight_version = proof.weight_version
        engine.pin_s = engine.clock() - engine.machine.since
        engine.machine.transition(State.SERVING, order.name)
        log.info(
            "engine_pinned",
            engine=engine.name,
            weight_version=proof.weight_version,
            **proof.seconds,
        )
        engine.events.pinned(engine, order, proof)

    async def failed(self, order: Order, error: PinFailed) -> Ending:
        """Report a failed pin: whatever the cause, the weights are unknown now."""
        engine = self._engine
        engine.pinning = None
        log.warning(
            "pin_attempt_failed", engine=engine.name, stage=error.stage, detail=error.detail
        )
        # what never was up has no weights to be tainted
        state = State.UNHEALTHY if engine.state is State.STARTING else State.TAINTED
        if await is_gone(order.target.directory):
            self._report_gone(order)
            return ended(engine, state, f"the snapshot vanished: {error}", blamed=True)
        if self._upkeep.loading is not None:
            self._upkeep.loading.fast.failed(order.target.digest)
        own_fault = engine.events.pin_failed(engine, order, error)
        return ended(engine, state, str(error), blamed=not own_fault)

    def _report_gone(self, order: Order) -> None:
        engine = self._engine
        if engine.order is order:
            engine.order = None
        gone = SnapshotGone(f"cannot load {order.name}: the directory has vanished")
        engine.events.pin_failed(engine, order, gone)
