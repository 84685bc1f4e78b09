"""A W&B server on loopback, as far as one run needs it: begin, go on, history and summary."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any, Self

from aiohttp import web

_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


class FakeWandb:
    """Keeps runs in memory; runs in a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        #: run id -> lines of its history, in order.
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.summary: dict[str, dict[str, Any]] = {}
        self.config: dict[str, dict[str, Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-wandb")

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def rows(self, run: str) -> list[dict[str, Any]]:
        """What was logged, without what W&B adds itself."""
        return [
            {name: value for name, value in row.items() if not name.startswith("_")}
            for row in self.history.get(run, [])
        ]

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([
            web.post("/graphql", self._graphql),
            web.post("/files/{project}/{run}/file_stream", self._stream),
            web.post("/files/{entity}/{project}/{run}/file_stream", self._stream),
            web.put("/upload", self._upload),
        ])  # fmt: skip
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def _graphql(self, request: web.Request) -> web.Response:
        asked = await request.json()
        match = _OPERATION.search(asked["query"])
        answer = getattr(self, f"_answer_{match[1]}", None) if match else None
        data = answer(asked.get("variables") or {}) if answer else {}
        return web.json_response({"data": data})

    @staticmethod
    def _answer_Viewer(_: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 # GraphQL's name
        return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}",
                           "teams": {"edges": []}}}  # fmt: skip

    def _answer_RunResumeStatus(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 # as above
        run = asked["name"]
        bucket = None
        if run in self.history:
            lines = [json.dumps(line) for line in self.history[run]]
            bucket = {
                **self._bucket(run),
                "summaryMetrics": json.dumps(self.summary.get(run, {})),
                "historyTail": json.dumps(lines[-1:]),
                "eventsTail": "[]",
                "eventsLineCount": 0,
                "logLineCount": 0,
                "tags": [],
                "notes": "",
                "wandbConfig": '{"t": 1}',  # it was begun by a client, not only planned
            }
        return {"model": {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"},
                          "bucket": bucket}}  # fmt: skip

    def _answer_UpsertBucket(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 # as above
        run = asked["name"]
        inserted = run not in self.history
        self.history.setdefault(run, [])
        self.config.setdefault(run, {}).update(json.loads(asked["config"] or "{}"))
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _bucket(self, run: str) -> dict[str, Any]:
        return {
            "id": run,
            "name": run,
            "displayName": run,
            "config": json.dumps(self.config.get(run, {})),
            "historyLineCount": len(self.history[run]),
            "project": {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"}},
        }

    def _answer_CreateRunFiles(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 # as above
        files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in asked["files"]]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}

    async def _stream(self, request: web.Request) -> web.Response:
        run = request.match_info["run"]
        files = (await request.json()).get("files") or {}
        history = files.get("wandb-history.jsonl")
        if history:
            lines = self.history[run]
            lines[history["offset"] :] = [json.loads(line) for line in history["content"]]
        summary = files.get("wandb-summary.json")
        if summary:
            self.summary[run] = json.loads(summary["content"][-1])
        return web.json_response({})

    @staticmethod
    async def _upload(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()
