"""One engine under supervision: start, probe, pin, restart. One task is its only writer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import structlog

from evald.config import Fleet
from evald.engines.api import EngineAPI, EngineError, EngineUnreachable
from evald.engines.launcher import Launched, Launcher
from evald.engines.pin import (
    Checksums,
    PinFailed,
    PinStage,
    Proof,
    drain,
    is_gone,
    load_and_prove,
)
from evald.engines.readiness import (
    DEATH_NOTICE_S,
    DEFAULT_LIMIT,
    MAX_LIMIT,
    ForeignServer,
    own_limit,
    wait_ready,
    with_death,
)
from evald.engines.sglang_table import flag_name
from evald.engines.slots import Slots
from evald.engines.state import ALIVE, RestartPolicy, State, StateMachine
from evald.errors import EvaldError, SnapshotGone
from evald.postures.contract import PinTarget
from evald.status.view import EngineView

log = structlog.get_logger(__name__)

#: aborting what runs, before the process is stopped.
STOP_ABORT_TIMEOUT_S = 2.0


class Order(msgspec.Struct, frozen=True, eq=False):
    """One point's wish to be served; each pin() makes a new one, also for the same target."""

    target: PinTarget


class Events(Protocol):
    """What an engine tells its fleet; called from the engine's task."""

    def changed(self) -> None:
        """Tell that the state changed."""

    def capacity_freed(self) -> None:
        """Tell that a request left."""

    def pinned(self, engine: Engine, order: Order, proof: Proof) -> None:
        """Tell that ``order`` is loaded and proven."""

    def pin_failed(self, engine: Engine, order: Order, error: PinFailed | SnapshotGone) -> bool:
        """Tell that an attempt failed; True when the engine, not the snapshot, is at fault."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why one life of the process ended."""

    state: State
    detail: str
    blamed: bool = False


class Engine:
    """Keeps one server alive and on the weights of the current order.

    Read by the fleet: ``state``, ``order``, ``pinned`` (the order that it serves), ``pinning`` (the
    one that it drains and loads for), ``weight_version``, ``slots``, ``api``. Changed by the fleet
    through ``give`` and ``distrust`` only.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        config: Fleet,
        *,
        checksums: Checksums,
        events: Events,
        rng: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.order: Order | None = None
        self.pinned: Order | None = None
        self.pinning: Order | None = None
        self.weight_version: str | None = None
        self.api: EngineAPI | None = None
        self.slots = Slots(config.max_requests or DEFAULT_LIMIT, events.capacity_freed)
        self.sglang_version: str | None = None
        self.was_ready = False
        self._launcher = launcher
        self._config = config
        self._checksums = checksums
        self._events = events
        self._clock = clock
        self._machine = StateMachine(name, on_change=lambda _: events.changed(), clock=clock)
        self._policy = RestartPolicy(rng=rng, clock=clock)
        table = {flag_name(key): value for key, value in config.sglang.items()}
        # sticky on the server, hence named in every update
        self._load_format = str(table.get("load-format", "auto"))
        self._attempt = 0
        self._pid: int | None = None
        self._alive_since: float | None = None
        self._last_answer = -float("inf")
        self._wake = asyncio.Event()
        self._distrust = ""
        self._aborts: set[asyncio.Task[None]] = set()

    # --- what the fleet sees and does ------------------------------------------------------------

    @property
    def state(self) -> State:
        """The current state."""
        return self._machine.state

    @property
    def alive(self) -> bool:
        """Whether the engine can work, now or after its pin."""
        return self.state in ALIVE

    @property
    def life(self) -> int:
        """Number of the process, from 1: another one means that the last has died."""
        return self._attempt

    def serves(self, order: Order) -> bool:
        """Whether ``order`` is loaded, proven and open for requests."""
        return self.state is State.SERVING and self.pinned is order

    def connected_api(self) -> EngineAPI:
        """Return the API of the running server; raises EngineUnreachable when there is none."""
        if self.api is None:
            raise EngineUnreachable(f"engine {self.name} is down")
        return self.api

    def give(self, order: Order | None) -> None:
        """Set what to serve; None: whatever is loaded, and the base model after a restart."""
        if order is not self.order:
            self.order = order
            self._wake.set()

    def distrust(self, detail: str) -> None:
        """Have the engine restarted: it answered with weights that nobody asked for."""
        self._distrust = self._distrust or detail
        self._wake.set()

    def answered(self) -> None:
        """Note that a response finished: that beats any probe."""
        self._last_answer = self._clock()

    def abort_soon(self, rids: list[str]) -> None:
        """Abort requests whose answers nobody waits for any more."""
        if self.api is not None:
            task = asyncio.create_task(self.api.abort_quietly(rids), name=f"abort:{self.name}")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def view(self) -> EngineView:
        """Describe the engine for status and records."""
        return EngineView(
            name=self.name,
            state=str(self.state),
            weight_version=self.weight_version,
            in_flight=self.slots.in_flight,
            restarts=self._policy.restarts,
            pid=self._pid,
            detail=self._machine.detail,
        )

    # --- lives -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the server running; return when it is quarantined, leave no process behind."""
        try:
            while True:
                ending = await self._live()
                healthy_s = 0.0 if self._alive_since is None else self._clock() - self._alive_since
                wait_s = self._policy.next_wait_s(healthy_s, blamed=ending.blamed)
                if wait_s is None:
                    self._machine.transition(State.QUARANTINED, ending.detail)
                    log.error("engine_quarantined", engine=self.name, detail=ending.detail)
                    return
                self._machine.transition(State.BACKOFF, ending.detail)
                await asyncio.sleep(wait_s)
        finally:
            if self.state is not State.QUARANTINED and self.state is not State.STOPPED:
                self._machine.transition(State.STOPPED)

    async def _live(self) -> Ending:
        """One process, from launch until nothing of it is left."""
        self._attempt += 1
        self._alive_since = None
        self._distrust = ""
        self.pinning = None
        self._machine.transition(State.STARTING, f"attempt {self._attempt}")
        try:
            launched = await self._launcher.launch(self._attempt)
        except (EvaldError, OSError) as error:
            return self._ended(State.UNHEALTHY, f"cannot launch: {error}")
        process = launched.process
        try:
            self._pid = process.pid
            self.api = EngineAPI(launched.url, launched.api_key, limit=MAX_LIMIT)
            return await self._watch(self._serve(self.api, launched), launched)
        finally:
            try:
                await self._take_down(launched)
            finally:
                process.kill()
                self._pid = None

    async def _watch(self, serving: Coroutine[Any, Any, Ending], launched: Launched) -> Ending:
        """Serve until that ends by itself or the process does."""
        process = launched.process
        serve = asyncio.create_task(serving, name=f"serve:{self.name}")
        exited = asyncio.create_task(process.wait(), name=f"exit:{self.name}")
        try:
            await asyncio.wait((serve, exited), return_when=asyncio.FIRST_COMPLETED)
            if not serve.done() and self.state is State.PINNING:
                # its calls fail now, too, and know better at which stage
                await asyncio.wait((serve,), timeout=DEATH_NOTICE_S)
            if serve.done():
                return serve.result()
            detail = f"process ended with code {process.returncode}; see {launched.log}"
            if self.state is State.PINNING and self.pinning is not None:
                return await self._pin_ended(self.pinning, PinFailed(PinStage.LOAD, detail))
            return self._ended(State.UNHEALTHY, detail)
        finally:
            serve.cancel()
            exited.cancel()
            await asyncio.wait((serve, exited))

    async def _take_down(self, launched: Launched) -> None:
        api, self.api = self.api, None
        self.pinned = self.weight_version = None
        for task in self._aborts:
            task.cancel()
        if api is not None:
            if launched.process.returncode is None:
                # SIGTERM lets requests finish without a deadline of its own
                with contextlib.suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(STOP_ABORT_TIMEOUT_S):
                        await api.abort()
            await api.close()
        try:
            await launched.process.stop(self._config.stop_grace_s)
        except EvaldError as error:
            log.error("engine_not_stopped", engine=self.name, detail=str(error))  # noqa: TRY400
            # (no traceback: the sentence is complete)

    def _ended(self, state: State, detail: str, *, blamed: bool = False) -> Ending:
        self.pinned = self.weight_version = None
        self._machine.transition(state, detail)
        return Ending(state=state, detail=detail, blamed=blamed)

    # --- one life --------------------------------------------------------------------------------

    async def _serve(self, api: EngineAPI, launched: Launched) -> Ending:
        """Start, then pin and probe until something fails."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                info = await wait_ready(api, launched, self._config.probe_timeout_s)
        except TimeoutError:
            detail = f"not ready within {self._config.start_timeout_s:g} s; see {launched.log}"
            return self._ended(State.UNHEALTHY, detail)
        except ForeignServer as error:
            return self._ended(State.UNHEALTHY, str(error))
        version = info.get("version")
        self.sglang_version = version if isinstance(version, str) else None
        self.slots.limit = self._config.max_requests or own_limit(info)
        self._alive_since = self._clock()
        self.was_ready = True
        self._machine.transition(State.READY)
        failed_probes = 0
        while True:
            self._wake.clear()
            if self._distrust:
                return self._ended(State.UNHEALTHY, self._distrust)
            order = self.order
            if order is not None and order is not self.pinned:
                ending = await self._pin(api, launched, order)
                if ending is not None:
                    return ending
                failed_probes = 0
                continue
            if await self._woken(self._config.probe_interval_s):
                continue
            failure = await self._probe(api)
            failed_probes = failed_probes + 1 if failure else 0
            if failed_probes >= self._config.probe_failures:
                return self._ended(
                    State.UNHEALTHY, f"{failed_probes} health probes in a row failed: {failure}"
                )

    async def _woken(self, timeout_s: float) -> bool:
        """Wait for an order or distrust; False when ``timeout_s`` passed without any."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _probe(self, api: EngineAPI) -> str:
        """Probe once, unless a response proves more; the failure, or an empty string.

        An order does not wait for the probe: it is cancelled.
        """
        began = self._clock()
        if self._last_answer > began - self._config.probe_interval_s:
            return ""
        probe = asyncio.create_task(
            api.health_generate(self._config.probe_timeout_s), name=f"probe:{self.name}"
        )
        woken = asyncio.create_task(self._wake.wait(), name=f"probe-wake:{self.name}")
        try:
            await asyncio.wait((probe, woken), return_when=asyncio.FIRST_COMPLETED)
            if not probe.done():
                return ""
            await probe
        except EngineError as error:
            if self._last_answer > began:
                return ""
            log.warning("engine_probe_failed", engine=self.name, detail=str(error))
            return str(error)
        finally:
            probe.cancel()
            woken.cancel()
        return ""

    # --- pinning ---------------------------------------------------------------------------------

    async def _pin(self, api: EngineAPI, launched: Launched, order: Order) -> Ending | None:
        """Make the engine serve ``order``; what ended its life, or None."""
        target = order.target
        if await is_gone(target.directory):
            self._report_gone(order)
            return None
        self.pinning = order
        self.weight_version = self.pinned = None
        if self.state is State.SERVING:
            self._machine.transition(State.DRAINING)
        try:
            await drain(api, self.slots, self._config.drain_timeout_s)
        except PinFailed as error:
            self.pinning = None
            self._events.pin_failed(self, order, error)
            return self._ended(State.UNHEALTHY, str(error))
        self._machine.transition(State.PINNING, str(target.directory))
        try:
            proof = await load_and_prove(
                api,
                target,
                engine=self.name,
                load_format=self._load_format,
                load_timeout_s=self._config.load_timeout_s,
                checksums=self._checksums,
            )
        except PinFailed as error:
            return await self._pin_ended(order, await with_death(launched, error))
        self.pinning = None
        self.pinned = order
        self.weight_version = proof.weight_version
        self._machine.transition(State.SERVING, str(target.directory))
        log.info("engine_pinned", engine=self.name, weight_version=proof.weight_version)
        self._events.pinned(self, order, proof)
        return None

    async def _pin_ended(self, order: Order, error: PinFailed) -> Ending:
        """Report a failed update: whatever the cause, the weights are unknown now."""
        self.pinning = None
        log.warning("pin_attempt_failed", engine=self.name, stage=error.stage, detail=error.detail)
        if await is_gone(order.target.directory):
            self._report_gone(order)
            return self._ended(State.TAINTED, f"the snapshot vanished: {error}", blamed=True)
        own_fault = self._events.pin_failed(self, order, error)
        return self._ended(State.TAINTED, str(error), blamed=not own_fault)

    def _report_gone(self, order: Order) -> None:
        if self.order is order:
            self.order = None
        gone = SnapshotGone(f"cannot load {order.target.directory}: the directory has vanished")
        self._events.pin_failed(self, order, gone)
