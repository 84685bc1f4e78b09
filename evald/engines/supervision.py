"""The one task of an engine: start, probe, pin, restart, again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from evald.engines.adaptive import MOST
from evald.engines.api import EngineAPI, EngineError
from evald.engines.between_lives import BetweenLives, set_within
from evald.engines.engine import SLACK_S, Engine
from evald.engines.launcher import Launched, Launcher
from evald.engines.new_weights import Ending, NewWeights, ended
from evald.engines.pin import PinFailed, PinStage
from evald.engines.probing import Probes
from evald.engines.process_log import last_words
from evald.engines.readiness import (
    DEATH_NOTICE_S,
    ForeignServer,
    layout_of,
    may_move,
    wait_ready,
)
from evald.engines.server_size import read_size
from evald.engines.start_gate import Place
from evald.engines.state import State
from evald.errors import EvaldError

log = structlog.get_logger(__name__)

#: aborting what runs, before the server is left alone or stopped.
STOP_ABORT_TIMEOUT_S = 2.0


class Supervisor:
    """Keeps one server alive and on the weights of the engine's order."""

    def __init__(
        self, engine: Engine, launcher: Launcher, *, rng: Callable[[], float] = random.random
    ) -> None:
        self._engine = engine
        self._launcher = launcher
        self._limits = engine.limits
        self._upkeep = engine.upkeep
        self._weights = NewWeights(engine)
        self._between = BetweenLives(engine, launcher, rng=rng)
        self._attempt = 0
        self._alive_since: float | None = None
        #: why the last life ended, if it was not planned.
        self._trouble = ""

    async def run(self) -> None:
        """Keep the server running until cancelled; leave no process behind."""
        engine = self._engine
        try:
            while True:
                await self._until_wanted()
                starts = self._upkeep.starts
                async with starts.place(engine.name, again=engine.was_ready) as place:
                    ending = await self._live(place)
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

    async def _live(self, place: Place) -> Ending:
        """One server, from launch until nothing of it is left.

        ``place``: left once the server has loaded its program.
        """
        engine = self._engine
        self._attempt += 1
        engine.life = self._attempt
        self._alive_since = None
        engine.distrusted = ""
        engine.recalled.clear()
        boot = await self._weights.plan()
        before = f"; before: {self._trouble}" if self._trouble else ""
        engine.machine.transition(State.STARTING, f"attempt {self._attempt}{before}")
        try:
            launched = await self._launcher.launch(self._attempt, boot)
        except (EvaldError, OSError) as error:
            return ended(engine, State.UNHEALTHY, f"cannot launch: {error}")
        process = launched.process
        try:
            engine.pid = process.pid
            engine.api = EngineAPI(
                launched.url, launched.api_key, limit=self._limits.max_requests or MOST
            )
            return await self._watch(self._serve(engine.api, launched, place), launched)
        finally:
            try:
                await self._take_down(launched)
            finally:
                process.kill()
                engine.pid = None

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
                return ended(engine, State.STOPPED, engine.recall_reason)
            # nothing else moves the engine on while its log is read
            serve.cancel()
            await asyncio.wait((serve,))
            if not serve.cancelled():
                return serve.result()
            words = await asyncio.to_thread(last_words, launched.log, secret=launched.api_key)
            said = f", its last words: {words}" if words else ""
            detail = f"process ended with code {process.returncode}{said}; see {launched.log}"
            if engine.pinning is not None and engine.state in (State.PINNING, State.STARTING):
                starting = engine.state is State.STARTING
                stage = PinStage.START if starting else PinStage.LOAD
                return await self._weights.failed(engine.pinning, PinFailed(stage, detail))
            return ended(engine, State.UNHEALTHY, detail)
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

    async def _serve(self, api: EngineAPI, launched: Launched, place: Place) -> Ending:
        """Start, then pin and probe until something fails."""
        engine = self._engine
        ending = await self._start(api, launched, place)
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
                return ended(engine, State.UNHEALTHY, engine.distrusted)
            order = engine.order
            if order is None and self._upkeep.on_demand:
                return ended(engine, State.STOPPED, "no point wants it")
            if order is not None and order is not engine.pinned:
                ending = await self._weights.take(api, launched, order)
                if ending is not None:
                    return ending
                probes.forget()
            elif not await set_within(engine.woken, probes.wait_s):
                failure = await probes.probe()
                if failure:
                    return ended(engine, State.UNHEALTHY, failure)

    async def _start(self, api: EngineAPI, launched: Launched, place: Place) -> Ending | None:
        """Wait until the server is ready; what ended its life, or None."""
        engine, upkeep = self._engine, self._upkeep
        try:
            async with asyncio.timeout(upkeep.start_timeout_s):
                info = await wait_ready(
                    api,
                    launched,
                    self._limits.probe_timeout_s,
                    generate=not upkeep.on_demand,
                    on_answer=place.leave,
                )
        except TimeoutError:
            detail = f"not ready within {upkeep.start_timeout_s:g} s; see {launched.log}"
            if engine.pinning is not None:
                return await self._weights.failed(engine.pinning, PinFailed(PinStage.START, detail))
            return ended(engine, State.UNHEALTHY, detail)
        except ForeignServer as error:
            return ended(engine, State.UNHEALTHY, str(error))
        self._alive_since = engine.clock()
        version = info.get("version")
        engine.sglang_version = version if isinstance(version, str) else None
        self._weights.layout = layout_of(info)
        engine.limit.learn(read_size(info))
        engine.may_move = may_move(info)
        if upkeep.loading is not None and launched.nonce is not None:
            trouble = await upkeep.mode.test(engine.name, api, upkeep.loading, launched.nonce)
            if trouble:
                # the server did what it can: that is no fault of this engine
                return ended(engine, State.UNHEALTHY, trouble, blamed=True)
        return None
