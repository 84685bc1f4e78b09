"""What the daemon answers over HTTP: the same on its unix socket and, with a token, on TCP."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from evald.errors import EvaldError
from evald.results.compressed import open_samples
from evald.results.sample_files import samples_file
from evald.status.asked import natural, seconds
from evald.status.assets import Assets, is_asset
from evald.status.command import Command
from evald.status.events import Events
from evald.status.metrics import CONTENT_TYPE
from evald.status.page_routes import PageRoutes
from evald.status.pages import RecordPages
from evald.status.sample_pages import FindQuestion, SamplePages
from evald.status.view import LAST_SEQ_HEADER, StatusView
from evald.text import encode_json

log = structlog.get_logger(__name__)

RECORDS_LIMIT = 1000
#: the longest that ``/records`` waits for a new record.
MAX_WAIT_S = 30.0
#: how often a waiting request looks.
LOOK_S = 0.1
NDJSON = "application/x-ndjson"
_CHUNK_BYTES = 256 << 10
#: a reader of samples that takes nothing for this long is given up.
_STUCK_S = 60.0
_DENIED_LOG_INTERVAL_S = 60.0

#: carries out a command and says what was done; raises EvaldError with why not.
Operate = Callable[[Command], Awaitable[str]]
#: gives the page of metrics.
Exposition = Callable[[], bytes]


class Routes:
    """The handlers of all paths.

    ``GET /status`` answers a StatusView. ``GET /records?after=SEQ&limit=N&wait_s=S`` answers at
    most ``limit`` (default and maximum 1000) lines with ``seq`` above ``after``, oldest first, as
    newline-delimited JSON, just as they stand in the ledger; while there is none it waits up to
    ``wait_s`` (maximum 30) seconds. ``GET /samples?record_id=ID&set=NAME`` answers the stored
    samples of one eval set of a point. ``POST /operate`` takes a Command: 200 with a sentence, 409
    with the reason of a refusal. ``GET /metrics`` is for Prometheus. ``GET /`` is the
    status page; what it asks for beside these: see :class:`PageRoutes`.
    """

    def __init__(
        self,
        *,
        view: Callable[[], StatusView],
        results_file: Path,
        newest_seq: Callable[[], int],
        operate: Operate,
        find_question: FindQuestion,
        metrics: Exposition | None,
    ) -> None:
        """``newest_seq``: seq of the newest record that is in the file for good."""
        self._view = view
        self._operate = operate
        self._newest_seq = newest_seq
        self._results_dir = results_file.parent
        self._pages = RecordPages(results_file)
        self._closing = False
        self._metrics = metrics
        self._events = Events(view=view, newest_seq=newest_seq, page=self._pages.page)
        self._page_routes = [
            *Assets().routes(),
            *PageRoutes(
                self._results_dir,
                events=self._events,
                samples=SamplePages(self._results_dir, find_question=find_question),
            ).routes(),
        ]

    def app(self, *, token: str | None) -> web.Application:
        """Return an application for one listener; None: its own mode protects it."""
        app = web.Application(middlewares=[] if token is None else [_ask_for(token)])
        app.add_routes([
            web.get("/status", self._status),
            web.get("/records", self._records),
            web.get("/samples", self._samples),
            web.post("/operate", self._command),
            web.get("/metrics", self._exposition),
            *self._page_routes,
        ])  # fmt: skip
        return app

    def close(self) -> None:
        """Let requests that wait for a record come back."""
        self._closing = True
        self._events.close()

    async def _status(self, _request: web.Request) -> web.Response:
        return web.Response(body=encode_json(self._view()), content_type="application/json")

    async def _exposition(self, _request: web.Request) -> web.Response:
        if self._metrics is None:
            raise web.HTTPNotFound
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _records(self, request: web.Request) -> web.Response:
        asked = request.query
        try:
            after = natural(asked.get("after", "0"), "after")
            limit = min(natural(asked.get("limit", str(RECORDS_LIMIT)), "limit"), RECORDS_LIMIT)
            wait_s = min(seconds(asked.get("wait_s", "0"), "wait_s"), MAX_WAIT_S)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        until = time.monotonic() + wait_s
        while self._newest_seq() <= after and time.monotonic() < until:
            if self._closing or request.transport is None:
                break
            await asyncio.sleep(LOOK_S)
        newest = self._newest_seq()  # before the page: a reader is never told more than it got
        body = await asyncio.to_thread(self._pages.page, after, limit)
        return web.Response(body=body, content_type=NDJSON, headers={LAST_SEQ_HEADER: str(newest)})

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        record_id, name = request.query.get("record_id", ""), request.query.get("set", "")
        try:
            path = samples_file(self._results_dir, record_id, name)
        except ValueError as error:
            return web.Response(status=404, text=f"{error}\n")
        try:
            file = await asyncio.to_thread(open_samples, path)
        except FileNotFoundError:
            sentence = f"cannot answer samples: there are none of set {name} of {record_id}\n"
            return web.Response(status=404, text=sentence)
        with file:
            return await _stream(request, file)

    async def _command(self, request: web.Request) -> web.Response:
        try:
            command = msgspec.json.decode(await request.read(), type=Command)
        except (msgspec.DecodeError, RecursionError) as error:
            return web.Response(status=400, text=f"cannot understand the command: {error}")
        try:
            return web.Response(text=await self._operate(command))
        except EvaldError as error:
            return web.Response(status=409, text=str(error))


async def _stream(request: web.Request, file: BinaryIO) -> web.StreamResponse:
    """Send the whole lines of a file; what a writer has half written is left out."""
    response = web.StreamResponse(headers={"Content-Type": NDJSON})
    await response.prepare(request)
    torn = b""
    while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
        whole, newline, torn = (torn + chunk).rpartition(b"\n")
        if not newline:
            continue
        try:
            async with asyncio.timeout(_STUCK_S):
                await response.write(whole + newline)
        except TimeoutError:
            log.info("samples_reader_stuck", peer=request.remote)
            if request.transport is not None:
                request.transport.abort()
            return response
    await response.write_eof()
    return response


def _ask_for(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()
    logged_s = -_DENIED_LOG_INTERVAL_S

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal logged_s
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if hmac.compare_digest(given, expected) or is_asset(request.path):
            return await handler(request)
        now_s = time.monotonic()
        if now_s - logged_s >= _DENIED_LOG_INTERVAL_S:  # nobody can fill the log
            logged_s = now_s
            log.warning("status_denied", peer=request.remote, path=request.path)
        return web.Response(
            status=401,
            text="cannot answer: the token is missing or wrong; send the header "
            "Authorization: Bearer TOKEN\n",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return guarded
