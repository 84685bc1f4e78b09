"""Fake servers that somebody else runs, for the tests of the attached and the shared posture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from fleet_rig import request, target_of

from evald.config import Attached
from evald.errors import EvaldError
from evald.point import PinTarget
from evald.postures.attached import attached_engines
from evald.postures.contract import Engines, Generation, Pin
from evald.postures.engine_pool import EnginePool
from evald.testing import FakeEngine, FakeServer, serve_fake, write_snapshot

KEY = "sk-very-secret"


class Host:
    """One server: it may die, and come back at the same address."""

    def __init__(self, model: Path, api_key: str | None) -> None:
        self._model = model
        self._api_key = api_key
        self.fake = FakeEngine(model)
        self.server: FakeServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    async def start(self, *, weight_version: str = "default") -> None:
        """Start, or come back after ``die``."""
        port = 0 if self.server is None else urlsplit(self.server.url).port or 0
        if self.server is not None:
            await self.server.process.stop(0.0)
        self.fake = FakeEngine(
            self._model,
            weight_version=weight_version,
            api_key=self._api_key,
            on_death=self.die,
        )
        self.server = await serve_fake(self.fake, port)

    def die(self) -> None:
        assert self.server is not None
        self.server.process.kill()

    @property
    def alive(self) -> bool:
        return self.server is not None and self.server.process.returncode is None


@contextlib.asynccontextmanager
async def hosts(
    model: Path,
    count: int = 1,
    *,
    api_key: str | None = None,
    weight_version: str = "default",
) -> AsyncIterator[list[Host]]:
    """Run ``count`` servers; all of them must still live at the end, unless they were killed."""
    running = [Host(model, api_key) for _ in range(count)]
    try:
        for host in running:
            await host.start(weight_version=weight_version)
        yield running
    finally:
        for host in running:
            if host.server is not None:
                await host.server.process.stop(0.0)


@contextlib.asynccontextmanager
async def running(engines: Engines) -> AsyncIterator[asyncio.Task[None]]:
    """Supervise engines while the block runs."""
    task = asyncio.create_task(engines.run(), name="engines")
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup, EvaldError):
            await task


async def ask(
    engines: Engines, pin: Pin, samples: int = 1, timeout_s: float = 30.0
) -> list[Generation]:
    return await engines.generate(pin, request(samples, timeout_s))


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def states(engines: Engines) -> list[str]:
    return [view.state for view in engines.engines()]


def urls(servers: list[Host]) -> list[str]:
    return [host.url for host in servers]


def attached(base: Path, servers: list[Host], **settings: object) -> EnginePool:
    table = {
        "model": str(base),
        "urls": urls(servers),
        "alive_timeout_s": 5.0,
        "load_timeout_s": 5.0,
    } | settings
    return attached_engines(msgspec.convert(table, Attached), environ={"KEY": KEY})


def snapshot(base: Path, step: int) -> PinTarget:
    return target_of(write_snapshot(base.parent / f"step_{step}", answer=step), step)
