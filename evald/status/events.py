"""``GET /events``: the status and new records as they come, as server-sent events."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

import msgspec
import structlog
from aiohttp import web

from evald.status.asked import natural
from evald.status.page_records import Batch, PageRecords
from evald.status.view import StatusView
from evald.text import encode_json

log = structlog.get_logger(__name__)

#: streams at a time; each costs a look at the ledger's seq five times a second.
MAX_STREAMS = 16
#: how often a stream looks for new records.
LOOK_S = 0.2
#: between two states that differ, and between two that do not (the reader hears that we live).
STATUS_S = 1.0
IDLE_STATUS_S = 5.0
#: lines of the ledger in one event: a thread must not hold the interpreter for long.
_LINES = 200
#: a reader that takes nothing for this long is given up.
STUCK_S = 20.0
#: and one whose machine has gone without a word, which takes no notice of what is sent.
GONE_S = 30.0

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # a proxy that collects answers would hold them back
    "X-Accel-Buffering": "no",
}


class Events:
    """Serves streams: ``status`` (a StatusView), ``records`` (a Batch; its last seq is the ``id``).

    A stream begins with the records after ``?after=SEQ``, or after the header ``Last-Event-ID``,
    which wins. A reader that has seen more than there is has read another ledger: it gets
    ``reset``, and then everything from the start. After the last of what was there it gets
    ``live`` once.
    """

    def __init__(
        self,
        *,
        view: Callable[[], StatusView],
        newest_seq: Callable[[], int],
        page: Callable[[int, int], bytes],
    ) -> None:
        """``page``: gives lines after a seq, at most so many; blocking."""
        self.view = view
        self.newest_seq = newest_seq
        self._page = page
        self._streams = 0
        self._closing = False

    def close(self) -> None:
        """Let all streams end."""
        self._closing = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer with a stream, until either side has enough."""
        text = request.headers.get("Last-Event-ID") or request.query.get("after", "0")
        try:
            after = natural(text, "after")
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        if self._streams >= MAX_STREAMS:
            return web.Response(
                status=503,
                text=f"cannot open another stream: {MAX_STREAMS} are open; close a page\n",
                headers={"Retry-After": "5"},
            )
        self._streams += 1
        try:
            response = web.StreamResponse(headers=_HEADERS)
            await response.prepare(request)
            _give_up_when_gone(request.transport)
            await _Stream(self, request, response, after=after).run()
        except ConnectionError:  # the reader has gone
            pass
        except TimeoutError:
            log.info("event_reader_stuck", peer=request.remote)
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return response

    def goes_on(self, request: web.Request) -> bool:
        """Tell whether both sides are there."""
        return not self._closing and request.transport is not None

    def batch(self, records: PageRecords, after: int) -> Batch:
        """Read the next records; blocking, raises OSError."""
        return records.batch(self._page(after, _LINES).splitlines())


class _Stream:
    """One reader's stream."""

    def __init__(
        self, events: Events, request: web.Request, response: web.StreamResponse, *, after: int
    ) -> None:
        self._events = events
        self._request = request
        self._response = response
        self._after = after
        self._records = PageRecords()
        self._live = False
        self._told_s = -IDLE_STATUS_S
        self._told: StatusView | None = None

    async def run(self) -> None:
        """Send until one of both sides ends it; raises ConnectionError, TimeoutError."""
        while self._events.goes_on(self._request):
            await self._tell_status()
            if not await self._send_records():
                if not self._live:
                    self._live = True
                    await self._send("live", b"{}")
                await asyncio.sleep(LOOK_S)

    async def _send_records(self) -> bool:
        newest = self._events.newest_seq()
        if newest < self._after:
            self._after, self._records, self._live = 0, PageRecords(), False
            await self._send("reset", b"{}")
        if newest <= self._after:
            return False
        try:
            batch = await asyncio.to_thread(self._events.batch, self._records, self._after)
        except OSError as error:  # a disk that fails: the ledger's writer says more about it
            log.warning("events_not_read", error=str(error))
            return False
        if batch.last_seq <= self._after:
            return False  # moved away, or not yet in the file as this reader sees it
        self._after = batch.last_seq
        if batch.records:
            await self._send("records", encode_json(batch), seq=batch.last_seq)
        return True

    async def _tell_status(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < STATUS_S:
            return
        view = self._events.view()
        same = self._told is not None and _still(view) == _still(self._told)
        if same and now_s - self._told_s < IDLE_STATUS_S:
            return
        self._told_s, self._told = now_s, view
        await self._send("status", encode_json(view))

    async def _send(self, event: str, data: bytes, *, seq: int | None = None) -> None:
        head = f"event: {event}\n" if seq is None else f"id: {seq}\nevent: {event}\n"
        async with asyncio.timeout(STUCK_S):
            await self._response.write(head.encode() + b"data: " + data + b"\n\n")


def _give_up_when_gone(transport: asyncio.BaseTransport | None) -> None:
    """Let the kernel end a connection whose other side confirms nothing any more."""
    found = None if transport is None else transport.get_extra_info("socket")
    if found is not None and found.family in {socket.AF_INET, socket.AF_INET6}:
        # (what the loop gives only looks like a socket; an option set on a copy is set on both)
        with socket.socket(fileno=os.dup(found.fileno())) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * GONE_S))


def _still(view: StatusView) -> StatusView:
    """Return the status without what changes by itself."""
    return msgspec.structs.replace(view, beat=0, time=0.0, uptime_s=0.0)
