"""What the status page asks for beside the API: events, samples by page, logs of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from evald.results.sample_heads import FILTERS, Filter
from evald.status.asked import natural
from evald.status.engine_log import log_lines
from evald.status.events import Events
from evald.status.sample_pages import MAX_SAMPLES, SamplePages
from evald.text import encode_json

_LOG_LINES = 200


class EngineLog(msgspec.Struct):
    """The answer of ``/engines/NAME/log``."""

    engine: str
    file: str
    lines: list[str]


class PageRoutes:
    """The handlers.

    ``GET /events?after=SEQ``: see :class:`Events`. ``GET /samples/page?record_id=ID&set=NAME`` with
    ``filter=all|wrong|truncated|no_answer|failed|flipped``, ``against=ID`` (flipped since that
    point), ``offset=N`` and ``limit=N`` (default 50, maximum 200) answers a SamplePage;
    ``GET /samples/one?record_id=ID&set=NAME&question=ID&sample=N&against=ID`` a SampleDetail;
    ``GET /engines/NAME/log?lines=N`` (default 200) the end of an engine's newest log.
    """

    def __init__(self, results_dir: Path, *, events: Events, samples: SamplePages) -> None:
        self._results_dir = results_dir
        self._events = events
        self._samples = samples
        self._turn = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/events", self._events.handle),
            web.get("/samples/page", self._page),
            web.get("/samples/one", self._one),
            web.get("/engines/{name}/log", self._log),
        ]

    async def _page(self, request: web.Request) -> web.Response:
        asked = request.query

        def read() -> msgspec.Struct:
            return self._samples.page(
                *_point(asked),
                _filter(asked.get("filter", "all")),
                natural(asked.get("offset", "0"), "offset"),
                min(natural(asked.get("limit", "50"), "limit"), MAX_SAMPLES),
            )

        return await self._in_turn(request, read)

    async def _one(self, request: web.Request) -> web.Response:
        asked = request.query

        def read() -> msgspec.Struct:
            number = natural(asked.get("sample", "0"), "sample")
            return self._samples.one(*_point(asked), asked.get("question", ""), number)

        return await self._in_turn(request, read)

    async def _in_turn(
        self, request: web.Request, read: Callable[[], msgspec.Struct]
    ) -> web.Response:
        """Read once the requests before have: who waits must hold no thread of the daemon's."""
        async with self._turn:
            if request.transport is None:  # somebody has clicked on
                return web.Response(status=503)
            return await _answer(read)

    async def _log(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]

        def read() -> msgspec.Struct:
            count = natural(request.query.get("lines", str(_LOG_LINES)), "lines")
            return EngineLog(name, *log_lines(self._results_dir, name, count))

        return await _answer(read, missing=f"evald has written no log of {name}")


async def _answer(
    read: Callable[[], msgspec.Struct], *, missing: str = "there is nothing stored of it"
) -> web.Response:
    """Read in a thread; what cannot be asked is 400, what is ``missing`` 404."""
    try:
        found = await asyncio.to_thread(read)
    except ValueError as error:
        return web.Response(status=400, text=f"{error}\n")
    except FileNotFoundError:
        return web.Response(status=404, text=f"cannot answer: {missing}\n")
    except OSError as error:
        return web.Response(
            status=500, text=f"cannot read what is stored: {error.strerror or error}\n"
        )
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return web.Response(body=encode_json(found), content_type="application/json", headers=headers)


def _point(asked: Mapping[str, str]) -> tuple[str, str, str]:
    return asked.get("record_id", ""), asked.get("set", ""), asked.get("against", "")


def _filter(text: str) -> Filter:
    for name in FILTERS:
        if name == text:
            return name
    raise ValueError(f"cannot use filter={text!r}: it must be one of {', '.join(FILTERS)}")
