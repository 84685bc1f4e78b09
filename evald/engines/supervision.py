"""The one task of an engine: start, probe, pin, restart, again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from evald.engines.adaptive import MOST
from evald.engines.api import EngineAPI, EngineError
from evald.engines.between_lives import BetweenLives, set_within
from evald.engines.engine import SLACK_S, Engine, Order
from evald.engines.launcher import Boot, Launched, Launcher
from evald.engines.pin import (
    Loading,
    PinFailed,
    PinStage,
    Proof,
    drain,
    expected_version,
    is_gone,
    new_weight_version,
    served_version,
)
from evald.engines.probing import Probes
from evald.engines.process_log import last_words
from evald.engines.readiness import (
    DEATH_NOTICE_S,
    ForeignServer,
    layout_of,
    wait_ready,
    with_death,
)
from evald.engines.state import State
from evald.errors import EvaldError, SnapshotGone

log = structlog.get_logger(__name__)

#: aborting what runs, before the server is left alone or stopped.
STOP_ABORT_TIMEOUT_S = 2.0
#: between two looks at a server that has not come to the wanted weights yet.
VERSION_POLL_S = 0.2


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why one life of the server ended; STOPPED: as planned, the next one may begin."""

    state: State
    detail: str
    blamed: bool = False


class Supervisor:
    """Keeps one server alive and on the weights of the engine's order."""

    def __init__(
        self, engine: Engine, launcher: Launcher, *, rng: Callable[[], float] = random.random
    ) -> None:
        self._engine = engine
        self._launcher = launcher
        self._limits = engine.limits
        self._upkeep = engine.upkeep
        self._between = BetweenLives(engine, launcher, rng=rng)
        self._attempt = 0
        self._alive_since: float | None = None
        self._layout = ""
        #: why the last life ended, if it was not planned.
        self._trouble = ""
        #: the order that the server was started on, and with which version.
        self._booted: tuple[Order, str] | None = None

    async def run(self) -> None:
        """Keep the server running until cancelled; leave no process behind."""
        engine = self._engine
        try:
            while True:
                await self._until_wanted()
                ending = await self._live()
                if ending.state is not State.STOPPED:
                    await self._pause_after(ending)
        finally:
            if engine.state is not State.QUARANTINED and engine.state is not State.STOPPED:
                engine.machine.transition(State.STOPPED)

    async def _until_wanted(self) -> None:
        """Wait for a point, where the server is left alone without one."""
        engine = self._engine
        while self._upkeep.on_demand and engine.order is None:
            engine.woken.clear()
            if engine.state is not State.STOPPED:
                engine.machine.transition(State.STOPPED, self._trouble)
            await engine.woken.wait()

    async def _pause_after(self, ending: Ending) -> None:
        self._trouble = ending.detail
        healthy_s = 0.0 if self._alive_since is None else self._engine.clock() - self._alive_since
        await self._between.wait(ending.detail, healthy_s=healthy_s, blamed=ending.blamed)

    # --- one life --------------------------------------------------------------------------------

    async def _live(self) -> Ending:
        """One server, from launch until nothing of it is left."""
        engine = self._engine
        self._attempt += 1
        engine.life = self._attempt
        self._alive_since = None
        engine.distrusted = ""
        engine.recalled.clear()
        boot = await self._plan()
        before = f"; before: {self._trouble}" if self._trouble else ""
        engine.machine.transition(State.STARTING, f"attempt {self._attempt}{before}")
        try:
            launched = await self._launcher.launch(self._attempt, boot)
        except (EvaldError, OSError) as error:
            return self._ended(State.UNHEALTHY, f"cannot launch: {error}")
        process = launched.process
        try:
            engine.pid = process.pid
            engine.api = EngineAPI(
                launched.url, launched.api_key, limit=self._limits.max_requests or MOST
            )
            return await self._watch(self._serve(engine.api, launched), launched)
        finally:
            try:
                await self._take_down(launched)
            finally:
                process.kill()
                engine.pid = None

    async def _plan(self) -> Boot | None:
        """Decide what to start on: the order's snapshot, or (None) the base model."""
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

    async def _watch(self, serving: Coroutine[Any, Any, Ending], launched: Launched) -> Ending:
        """Serve until that ends by itself, the process does, or somebody wants a new one."""
        engine, process = self._engine, launched.process
        serve = asyncio.create_task(serving, name=f"serve:{engine.name}")
        exited = asyncio.create_task(process.wait(), name=f"exit:{engine.name}")
        recalled = asyncio.create_task(engine.recalled.wait(), name=f"recall:{engine.name}")
        limit = asyncio.create_task(
            engine.limit.run(engine.connected_api().loads), name=f"limit:{engine.name}"
        )
        tasks = (serve, exited, recalled, limit)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done() and (engine.state is State.PINNING or self._upkeep.mode.testing):
                # its calls fail now, too, and know better at which stage
                await asyncio.wait((serve,), timeout=DEATH_NOTICE_S)
            if serve.done():
                return serve.result()
            if limit.done():
                limit.result()  # raises what only a bug can raise
            if not exited.done():
                return self._ended(State.STOPPED, engine.recall_reason)
            words = await asyncio.to_thread(last_words, launched.log, secret=launched.api_key)
            said = f", its last words: {words}" if words else ""
            detail = f"process ended with code {process.returncode}{said}; see {launched.log}"
            if engine.pinning is not None and engine.state in (State.PINNING, State.STARTING):
                starting = engine.state is State.STARTING
                stage = PinStage.START if starting else PinStage.LOAD
                return await self._pin_ended(engine.pinning, PinFailed(stage, detail))
            return self._ended(State.UNHEALTHY, detail)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _take_down(self, launched: Launched) -> None:
        """Give its requests to others at once, and leave the server: stopped, if it is ours."""
        engine = self._engine
        api, engine.api = engine.api, None
        engine.pinned = engine.weight_version = None
        if api is not None:
            try:
                await self._abort_all(api, launched)
            finally:
                for task in engine.aborts:
                    task.cancel()
                await api.close()
        try:
            await launched.process.stop(self._upkeep.stop_grace_s)
        except EvaldError as error:
            log.error("engine_not_stopped", engine=engine.name, detail=str(error))  # noqa: TRY400
            # (no traceback: the sentence is complete)

    async def _abort_all(self, api: EngineAPI, launched: Launched) -> None:
        """Let nothing run on for nobody; requests that wait fail at once, and find others."""
        engine = self._engine
        rids = api.cut(f"engine {engine.name} is taken down")
        try:
            async with asyncio.timeout(STOP_ABORT_TIMEOUT_S):
                if not self._upkeep.owned:
                    # what others asked for stays; earlier aborts are under way
                    await asyncio.gather(api.abort_quietly(rids), *engine.aborts)
                elif launched.process.returncode is None and self._alive_since is not None:
                    # SIGTERM lets requests finish without a deadline of its own
                    await api.abort()
        except (EngineError, TimeoutError):
            log.info("aborts_unanswered", engine=engine.name)

    def _ended(self, state: State, detail: str, *, blamed: bool = False) -> Ending:
        engine = self._engine
        engine.pinned = engine.pinning = engine.weight_version = None
        engine.machine.transition(state, detail)
        return Ending(state=state, detail=detail, blamed=blamed)

    async def _serve(self, api: EngineAPI, launched: Launched) -> Ending:
        """Start, then pin and probe until something fails."""
        engine = self._engine
        ending = await self._start(api, launched)
        if ending is not None:
            return ending
        engine.was_ready, self._trouble = True, ""
        engine.machine.transition(State.READY)
        probes = Probes(engine, api)
        while True:
            engine.pulse.rest(
                str(engine.state), probes.wait_s + self._limits.probe_timeout_s + SLACK_S
            )
            engine.woken.clear()
            if engine.distrusted:
                return self._ended(State.UNHEALTHY, engine.distrusted)
            order = engine.order
            if order is None and self._upkeep.on_demand:
                return self._ended(State.STOPPED, "no point wants it")
            if order is not None and order is not engine.pinned:
                ending = await self._take(api, launched, order)
                if ending is not None:
                    return ending
                probes.forget()
            elif not await set_within(engine.woken, probes.wait_s):
                failure = await probes.probe()
                if failure:
                    return self._ended(State.UNHEALTHY, failure)

    async def _start(self, api: EngineAPI, launched: Launched) -> Ending | None:
        """Wait until the server is ready; what ended its life, or None."""
        engine, upkeep = self._engine, self._upkeep
        try:
            async with asyncio.timeout(upkeep.start_timeout_s):
                info = await wait_ready(
                    api, launched, self._limits.probe_timeout_s, generate=not upkeep.on_demand
                )
        except TimeoutError:
            detail = f"not ready within {upkeep.start_timeout_s:g} s; see {launched.log}"
            if self._booted is not None:
                return await self._pin_ended(self._booted[0], PinFailed(PinStage.START, detail))
            return self._ended(State.UNHEALTHY, detail)
        except ForeignServer as error:
            return self._ended(State.UNHEALTHY, str(error))
        self._alive_since = engine.clock()
        version = info.get("version")
        engine.sglang_version = version if isinstance(version, str) else None
        self._layout = layout_of(info)
        if upkeep.loading is not None and launched.nonce is not None:
            trouble = await upkeep.mode.test(engine.name, api, upkeep.loading, launched.nonce)
            if trouble:
                # the server did what it can: that is no fault of this engine
                return self._ended(State.UNHEALTHY, trouble, blamed=True)
        return None

    # --- new weights -----------------------------------------------------------------------------

    async def _take(self, api: EngineAPI, launched: Launched, order: Order) -> Ending | None:
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
            await drain(api, engine.slots, self._limits.drain_timeout_s, owned=self._upkeep.owned)
        except PinFailed as error:
            engine.pinning = None
            engine.events.pin_failed(engine, order, error)
            return self._ended(State.UNHEALTHY, str(error))
        booted = self._booted is not None and self._booted[0] is order
        if self._upkeep.mode.restart and not booted:
            # still on its way to the order: nobody else needs to try meanwhile
            detail = f"starts again on {order.name}"
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
            if self._booted is not None and self._booted[0] is order:
                version = self._booted[1]
            else:
                version = new_weight_version(target)
                await loading.load(api, target, version)
            proof = await loading.prove(
                api, target.digest, version, engine=engine.name, layout=self._layout
            )
        except PinFailed as error:
            return await self._pin_ended(order, await with_death(launched, error))
        self._serve_from_now(order, proof)
        return None

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
            return self._ended(State.UNHEALTHY, str(error))
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
        engine.machine.transition(State.SERVING, order.name)
        log.info("engine_pinned", engine=engine.name, weight_version=proof.weight_version)
        engine.events.pinned(engine, order, proof)

    async def _pin_ended(self, order: Order, error: PinFailed) -> Ending:
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
            return self._ended(state, f"the snapshot vanished: {error}", blamed=True)
        own_fault = engine.events.pin_failed(engine, order, error)
        return self._ended(state, str(error), blamed=not own_fault)

    def _report_gone(self, order: Order) -> None:
        engine = self._engine
        if engine.order is order:
            engine.order = None
        gone = SnapshotGone(f"cannot load {order.name}: the directory has vanished")
        engine.events.pin_failed(engine, order, gone)
