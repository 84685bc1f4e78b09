"""The status server: what the daemon does and what it recorded, over a unix socket and TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog
from aiohttp import web

from evald.errors import EvaldError
from evald.status.bounded import BoundedRunner
from evald.status.listen import TcpListener, show_address
from evald.status.routes import Exposition, Operate, Routes
from evald.status.sample_pages import AskedQuestion, FindQuestion
from evald.status.sockets import LINK_NAME, answers, check_fallback, fallback_dir, socket_path
from evald.status.view import StatusView

__all__ = ["StatusServer", "socket_path"]

log = structlog.get_logger(__name__)

SOCKET_MODE = 0o660
SHUTDOWN_TIMEOUT_S = 2.0
#: connections of each listener; a node is asked by a trainer, a few people and a monitor.
MAX_CONNECTIONS = 128


class StatusServer:
    """Serves the status, the ledger's records and samples, and takes an operator's commands.

    The unix socket's mode says who may ask there; ``tcp`` (None: no TCP) asks for a token. It is
    not encrypted: a tunnel or a proxy is. What can be asked: see :class:`Routes`.
    """

    def __init__(
        self,
        socket: Path,
        *,
        view: Callable[[], StatusView],
        results_file: Path,
        newest_seq: Callable[[], int],
        operate: Operate,
        tcp: TcpListener | None = None,
        find_question: FindQuestion | None = None,
        metrics: Exposition | None = None,
    ) -> None:
        """``find_question``: gives the questions of the eval sets; None: it has none.

        ``metrics`` answers ``/metrics``; None: there is no such page.
        """
        self.socket = socket
        #: the TCP address, with the port that it got; None while there is none.
        self.listen: str | None = None
        self._tcp = tcp
        self._routes = Routes(
            view=view,
            results_file=results_file,
            newest_seq=newest_seq,
            operate=operate,
            find_question=find_question or _no_question,
            metrics=metrics,
        )
        self._link = results_file.parent / LINK_NAME
        self._runners: list[web.AppRunner] = []
        self._inode = 0

    async def start(self) -> None:
        """Listen; raises EvaldError where that cannot be, or another daemon does already."""
        try:
            await asyncio.to_thread(self._make_way)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            try:
                await web.UnixSite(await self._runner(None), self.socket).start()
                await asyncio.to_thread(self._publish)
            except OSError as error:
                raise self._cannot(error) from error
            if self._tcp is not None:
                await self._start_tcp(self._tcp)
        except EvaldError:
            await self.close()
            raise
        log.info("status_listening", socket=str(self.socket), tcp=self.listen)

    async def _start_tcp(self, tcp: TcpListener) -> None:
        runner = await self._runner(tcp.token)
        try:
            await web.TCPSite(runner, tcp.host, tcp.port).start()
        except OSError as error:
            raise EvaldError(
                f"cannot listen on {show_address(tcp.host, tcp.port)}: {error.strerror or error}; "
                "set status.listen to an address of this machine and a free port"
            ) from error
        host, port, *_ = runner.addresses[0]
        self.listen = show_address(host, port)

    async def _runner(self, token: str | None) -> web.AppRunner:
        runner = BoundedRunner(
            self._routes.app(token=token),
            limit=MAX_CONNECTIONS,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def close(self) -> None:
        """Stop listening and take the socket away, unless it is another daemon's by now."""
        self._routes.close()
        self.listen = None
        while self._runners:
            await self._runners.pop().cleanup()
        if self._inode:
            await asyncio.to_thread(self._clean_up)
            self._inode = 0

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


def _no_question(_set_name: str, _question: str) -> AskedQuestion | None:
    return None
