"""The status server: what the daemon does and what it recorded, over a unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
from aiohttp import web

from evald.errors import EvaldError
from evald.results.follow import Follower
from evald.status.command import Command
from evald.status.sockets import LINK_NAME, answers, check_fallback, fallback_dir, socket_path
from evald.status.view import StatusView
from evald.text import encode_json

__all__ = ["StatusServer", "socket_path"]

log = structlog.get_logger(__name__)

SOCKET_MODE = 0o660
RECORDS_LIMIT = 1000
SHUTDOWN_TIMEOUT_S = 2.0


class _Seq(msgspec.Struct):
    seq: int


_seq_decoder = msgspec.json.Decoder(_Seq)


#: carries out a command and says what was done; raises EvaldError with why not.
Operate = Callable[[Command], Awaitable[str]]


class StatusServer:
    """Serves the status and the ledger's records, and takes an operator's commands.

    ``GET /status`` answers a StatusView, ``GET /records?after=SEQ`` ledger lines. ``POST /operate``
    takes a Command: 200 with a sentence, 409 with the reason of a refusal.
    ``/records`` answers at most ``limit`` (default and maximum 1000) lines with ``seq`` above
    ``after``, oldest first, as newline-delimited JSON, just as they stand in the ledger.
    """

    def __init__(
        self,
        socket: Path,
        *,
        view: Callable[[], StatusView],
        results_file: Path,
        operate: Operate,
    ) -> None:
        self.socket = socket
        self._operate = operate
        self._view = view
        self._results_file = results_file
        self._link = results_file.parent / LINK_NAME
        self._runner: web.AppRunner | None = None
        self._inode = 0

    async def start(self) -> None:
        """Listen; raises EvaldError where that cannot be, or another daemon does already."""
        try:
            await asyncio.to_thread(self._make_way)
        except OSError as error:
            raise self._cannot(error) from error
        app = web.Application()
        app.add_routes([
            web.get("/status", self._status),
            web.get("/records", self._records),
            web.post("/operate", self._command),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        try:
            await web.UnixSite(runner, self.socket).start()
            await asyncio.to_thread(self._publish)
        except OSError as error:
            await runner.cleanup()
            raise self._cannot(error) from error
        self._runner = runner
        log.info("status_listening", socket=str(self.socket))

    async def close(self) -> None:
        """Stop listening and take the socket away, unless it is another daemon's by now."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await asyncio.to_thread(self._clean_up)

    def _publish(self) -> None:
        self.socket.chmod(SOCKET_MODE)
        self._inode = self.socket.stat().st_ino
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self.socket.absolute())

    def _clean_up(self) -> None:
        if self.socket.is_socket() and self.socket.stat().st_ino == self._inode:
            self.socket.unlink()
        if not self._link.exists():  # it leads nowhere, so it is not another daemon's
            self._link.unlink(missing_ok=True)

    def _make_way(self) -> None:
        """Prepare the directory and remove a dead daemon's socket."""
        directory = self.socket.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory == fallback_dir():
            check_fallback(directory)
        if not self.socket.exists():
            return
        if not self.socket.is_socket():
            raise EvaldError(f"cannot listen on {self.socket}: a file that is no socket is there")
        if answers(self.socket):
            raise EvaldError(
                f"cannot listen on {self.socket}: another daemon answers there; "
                "stop it, or set status.socket to another path"
            )
        self.socket.unlink()

    def _cannot(self, error: OSError) -> EvaldError:
        return EvaldError(
            f"cannot listen on {self.socket}: {error}; "
            "set status.socket to a path where the daemon's user may write"
        )

    async def _status(self, _request: web.Request) -> web.Response:
        return web.Response(body=encode_json(self._view()), content_type="application/json")

    async def _records(self, request: web.Request) -> web.Response:
        try:
            after = _natural(request, "after", 0)
            limit = min(_natural(request, "limit", RECORDS_LIMIT), RECORDS_LIMIT)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        body = await asyncio.to_thread(self._lines, after, limit)
        return web.Response(body=body, content_type="application/x-ndjson")

    async def _command(self, request: web.Request) -> web.Response:
        try:
            command = msgspec.json.decode(await request.read(), type=Command)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"cannot understand the command: {error}")
        try:
            return web.Response(text=await self._operate(command))
        except EvaldError as error:
            return web.Response(status=409, text=str(error))

    def _lines(self, after: int, limit: int) -> bytes:
        with Follower(self._results_file) as follower:
            lines = [line for line in follower.read() if _seq_decoder.decode(line).seq > after]
        return b"".join(line + b"\n" for line in lines[:limit])


def _natural(request: web.Request, name: str, default: int) -> int:
    """Return a query argument that is a whole number from 0; raises ValueError."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"cannot use {name}={text!r}: it must be a whole number from 0")
    return int(text)
