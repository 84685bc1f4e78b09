"""A listener that strangers can reach must not take the daemon's file descriptors."""

from __future__ import annotations

from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class BoundedRunner(web.AppRunner):
    """Serves at most ``limit`` connections at a time: a further one closes the oldest.

    The oldest, so that connections which say nothing cannot keep others out.
    """

    def __init__(self, app: web.Application, *, limit: int, shutdown_timeout: float) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout)
        self._limit = limit

    @property
    def server(self) -> web.Server | None:
        """What makes a protocol for each connection; sites call it and do nothing else with it."""
        server = super().server
        return None if server is None else cast("web.Server", _Factory(server, self._limit))


class _Factory:
    def __init__(self, server: web.Server, limit: int) -> None:
        self._server = server
        self._limit = limit

    def __call__(self) -> RequestHandler:
        connections = self._server.connections
        if len(connections) >= self._limit:
            connections[0].force_close()
        return self._server()
