"""Fake engines in this process, under the supervision of real ones."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from evald.engines.launcher import Launched
from evald.errors import EvaldError
from evald.testing.fake_engine import FakeEngine


def write_fake_python(path: Path) -> Path:
    """Write an executable for ``[fleet] python``: it starts a FakeEngine instead of SGLang."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evald.testing "$@"\n')
    path.chmod(0o755)
    return path


class FakeProcess:
    """Stands in for the process of a FakeEngine that runs in this one."""

    def __init__(self, runner: web.AppRunner) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self._runner = runner
        self._exited = asyncio.Event()

    async def wait(self) -> int:
        """Wait for the end; the exit code."""
        await self._exited.wait()
        return self.returncode or 0

    async def stop(self, grace_s: float) -> None:
        """Close everything; ``grace_s`` is not needed."""
        del grace_s
        self.end(0)
        await self._runner.cleanup()

    def kill(self) -> None:
        """End at once."""
        self.end(-signal.SIGKILL)

    def end(self, returncode: int) -> None:
        """Stop listening, drop all connections, take the exit code (the first one counts)."""
        if self.returncode is not None:
            return
        self.returncode = returncode
        server = self._runner.server
        if server is not None:
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        for site in list(self._runner.sites):
            # the listening socket, synchronously: as a dead process would
            listening = getattr(site, "_server", None)
            if listening is not None:
                listening.close()
        self._exited.set()


class FakeLauncher:
    """Launches FakeEngines on ``model``; ``engines`` are all that it ever launched, newest last.

    ``configure`` sees each engine before it answers its first request. ``refuse`` holds messages:
    one is taken for each launch that shall fail. ``nonce``: overrides the launch nonce.
    """

    def __init__(
        self,
        model: Path,
        *,
        configure: Callable[[FakeEngine], None] = lambda _engine: None,
        delay_s: float = 0.0,
        max_running_requests: int = 128,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.processes: list[FakeProcess] = []
        self.refuse: list[str] = []
        self.nonce: str | None = None
        self._model = model
        self._configure = configure
        self._delay_s = delay_s
        self._max_running_requests = max_running_requests

    async def launch(self, attempt: int) -> Launched:
        """Start an engine on a free port of the loopback interface."""
        if self.refuse:
            raise EvaldError(self.refuse.pop(0))
        nonce = f"launch-{attempt}-{secrets.token_hex(4)}"
        api_key = secrets.token_hex(8)
        engine = FakeEngine(
            self._model,
            weight_version=self.nonce or nonce,
            api_key=api_key,
            delay_s=self._delay_s,
            max_running_requests=self._max_running_requests,
            on_death=lambda: process.end(-signal.SIGKILL),
        )
        runner = web.AppRunner(engine.app, access_log=None, shutdown_timeout=0.1)
        process = FakeProcess(runner)
        self._configure(engine)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.engines.append(engine)
        self.processes.append(process)
        host, port = runner.addresses[0][:2]
        return Launched(
            process=process,
            url=f"http://{host}:{port}",
            api_key=api_key,
            nonce=nonce,
            log="(no log)",
        )
