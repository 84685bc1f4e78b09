"""A fake of the routers that stand in front of several SGLang servers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp import web

UNAVAILABLE = 503


class FakeRouter:
    """Sends ``/generate`` to its workers in turn: ``app`` for aiohttp.

    A worker that fails makes the router answer 503 to everybody for ``closed_s`` seconds, as
    routers do while they look for the living; afterwards that worker is left out.
    """

    def __init__(
        self, workers: Sequence[str], *, api_key: str | None = None, closed_s: float = 0.2
    ) -> None:
        self.workers = list(workers)
        self.closed_s = closed_s
        #: rids in the order of their requests, and how many requests found the router closed.
        self.rids: list[str] = []
        self.refused = 0
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._turns = itertools.count()
        self._open_at = 0.0
        self.app = web.Application(client_max_size=2**30)
        self.app.add_routes([web.post("/generate", self._generate)])
        self.app.cleanup_ctx.append(self._client)

    async def _client(self, _app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(headers=self._headers) as self._session:
            yield

    async def _generate(self, request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        if loop.time() < self._open_at or not self.workers:
            self.refused += 1
            return web.json_response({"error": "no worker is available"}, status=UNAVAILABLE)
        body = await request.json()
        self.rids += body["rid"]
        worker = self.workers[next(self._turns) % len(self.workers)]
        try:
            async with self._session.post(f"{worker}/generate", json=body) as response:
                return web.Response(
                    body=await response.read(),
                    status=response.status,
                    content_type="application/json",
                )
        except aiohttp.ClientError:
            if worker in self.workers:
                self.workers.remove(worker)
            self._open_at = loop.time() + self.closed_s
            return web.json_response({"error": "the worker is gone"}, status=UNAVAILABLE)
