"""A fake training job: it asks its engines for rollouts all the time, unless it is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from aiohttp import web

FAILED = 500


class FakeTrainer:
    """Serves ``/pause`` and ``/resume``: ``app`` for aiohttp.

    ``run`` sends rollouts to ``engines`` (URLs), one at a time to each, with rids that begin with
    ``rollout``. A pause is answered when the last of them has ended.
    """

    def __init__(self, engines: Sequence[str]) -> None:
        self.engines = list(engines)
        #: "pause" and "resume", in order, and what was said with them.
        self.calls: list[str] = []
        self.bodies: list[dict[str, object]] = []
        #: how many of the next calls fail.
        self.failures = 0
        self.sent = 0
        self._go = asyncio.Event()
        self._go.set()
        self._idle = [asyncio.Event() for _ in engines]
        self.app = web.Application()
        self.app.add_routes([web.post("/pause", self._pause), web.post("/resume", self._resume)])

    @property
    def paused(self) -> bool:
        """Whether no rollout is sent."""
        return not self._go.is_set()

    async def run(self) -> None:
        """Send rollouts until cancelled."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for number in range(len(self.engines)):
                group.create_task(self._roll_out(session, number))

    async def _roll_out(self, session: aiohttp.ClientSession, number: int) -> None:
        while True:
            self._idle[number].set()
            await self._go.wait()
            self._idle[number].clear()
            self.sent += 1
            body = {
                "input_ids": [[1, 2, 3]],
                "sampling_params": [{"max_new_tokens": 4}],
                "rid": [f"rollout-{number}-{self.sent}"],
            }
            async with session.post(f"{self.engines[number]}/generate", json=body) as answer:
                await answer.read()
            await asyncio.sleep(0)

    async def pause(self) -> None:
        """Send no further rollout, and wait until the last one has ended."""
        self._go.clear()
        await asyncio.gather(*[idle.wait() for idle in self._idle])

    def resume(self) -> None:
        """Send rollouts again."""
        self._go.set()

    async def _pause(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.calls.append("pause")
        if self.failures:
            self.failures -= 1
            return web.Response(status=FAILED, text="not now")
        await self.pause()
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.calls.append("resume")
        if self.failures:
            self.failures -= 1
            return web.Response(status=FAILED, text="not now")
        self.resume()
        return web.json_response({})
