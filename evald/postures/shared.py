"""The shared posture: the training job's own engines, whose weights evald only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from evald.config import Shared
from evald.engines.attach_launcher import AttachLauncher, engine_names, read_api_key
from evald.engines.engine import Upkeep
from evald.errors import Unhealthy
from evald.point import PinTarget
from evald.postures.contract import Engines, GenerateRequest, Generation, Pin
from evald.postures.engine_pool import EnginePool, Member
from evald.postures.producer import Producer, ProducerError
from evald.postures.rules import Rules
from evald.pulse import Pulse
from evald.status.view import EngineView


def shared_engines(config: Shared, *, environ: Mapping[str, str]) -> Engines:
    """Build the pool of the servers at ``config.urls``; raises ConfigError (no API key)."""
    api_key = read_api_key(
        "shared", env=config.api_key_env, file=config.api_key_file, environ=environ
    )
    upkeep = Upkeep(start_timeout_s=config.alive_timeout_s, owned=False, on_demand=True)
    members = [
        Member(name=name, launcher=AttachLauncher(url, api_key), upkeep=upkeep)
        for name, url in zip(engine_names(config.urls), config.urls, strict=True)
    ]
    pool = EnginePool(members, config, Rules(loads=False, all_engines=True, frozen=True))
    if config.pause_and_resume is None:  # the trainer sees to that by itself
        return pool
    producer = Producer(*config.pause_and_resume, timeout_s=config.pause_timeout_s)
    return PausingEngines(pool, producer)


class PausingEngines:
    """Fulfils ``Engines``: the pool, between a pause of the producer and its resumption."""

    def __init__(self, pool: EnginePool, producer: Producer) -> None:
        self._pool = pool
        self._producer = producer
        self._resuming: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Verify on demand until cancelled; a resumption that is under way is waited for."""
        try:
            await self._pool.run()
        finally:
            if self._resuming:
                # each has a deadline of its own
                await asyncio.wait(self._resuming)

    async def pin(self, target: PinTarget) -> Pin:
        """Pause the producer, and check that every engine has the weights of ``target``.

        Raises VersionChanged or Unhealthy; the producer goes on then.
        """
        while self._resuming:
            # of a point that was aborted twice: too late, it would undo this pause
            await asyncio.wait(set(self._resuming))
        try:
            try:
                await self._producer.pause(target)
            except ProducerError as error:
                raise Unhealthy(str(error)) from error
            return await self._pool.pin(target)
        except BaseException:
            # a pause without an answer may have happened: resumption is never wrong
            await self._resume()
            raise

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question; raises VersionChanged when the weights have become others."""
        return await self._pool.generate(pin, request)

    async def confirm(self, pin: Pin) -> None:
        """Read every engine's version again; raises VersionChanged."""
        await self._pool.confirm(pin)

    async def unpin(self, pin: Pin) -> None:
        """End the point and let the producer go on."""
        try:
            await self._pool.unpin(pin)
        finally:
            await self._resume()

    async def restart(self, engine: str) -> None:
        """Refuse: raises EvaldError."""
        await self._pool.restart(engine)

    async def release(self, engine: str) -> None:
        """Refuse: raises EvaldError."""
        await self._pool.release(engine)

    def capacity(self, pin: Pin) -> int:
        """Count samples worth having in flight (at least 1)."""
        return self._pool.capacity(pin)

    def when_room(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call whenever the capacity may have grown."""
        self._pool.when_room(pin, call)

    def left(self, pin: Pin, samples: int) -> None:
        """Take in how many samples have no answer."""
        self._pool.left(pin, samples)

    def when_spare(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call never: a point has all engines to itself."""
        self._pool.when_spare(pin, call)

    def engines(self) -> list[EngineView]:
        """State of each engine."""
        return self._pool.engines()

    def pulses(self) -> list[Pulse]:
        """Pulse of each engine's task."""
        return self._pool.pulses()

    async def _resume(self) -> None:
        """Let the producer go on, whatever happens to who asks for it."""
        task = asyncio.create_task(self._producer.resume(), name="resume producer")
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)
        # a second cancellation must not leave a training job paused for ever
        await asyncio.shield(task)
