"""Fake engines in this process, under the supervision of real ones."""

from __future__ import annotations

import asyncio
import secrets
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from aiohttp import web

from evald.engines.launcher import Boot, Launched
from evald.errors import EvaldError
from evald.testing.decode_model import Decode
from evald.testing.fake_engine import FakeEngine


def write_fake_python(
    path: Path,
    *,
    delay_s: float = 0.0,
    response_chars: int = 0,
    vary: int = 0,
    fault_file: Path | None = None,
    decode: Decode | None = None,
    load_s: float = 0.0,
    usage_dir: Path | None = None,
) -> Path:
    """Write an executable for ``[fleet] python``: it starts a FakeEngine instead of SGLang.

    ``delay_s``: how long each of its answers takes; ``response_chars``: how long each one is;
    ``vary``, ``fault_file``, ``decode`` and ``load_s``: as FakeEngine has them. ``usage_dir``: a
    directory in which each engine that is stopped leaves a JSON file with its usage.
    """
    command = (
        f'"{sys.executable}" -m evald.testing "$@" '
        f"--delay-s {delay_s} --response-chars {response_chars} --vary {vary} --load-s {load_s}"
    )
    if fault_file is not None:
        command += f' --fault-file "{fault_file}"'
    if decode is not None:
        command += f" --decode '{msgspec.json.encode(decode).decode()}'"
    if usage_dir is not None:
        command += f' --usage-dir "{usage_dir}"'
    path.write_text(f"#!/bin/sh\nexec {command}\n")
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


class FakeServer(NamedTuple):
    """A FakeEngine (or another fake) that is being served in this process."""

    url: str
    process: FakeProcess


class Fake(Protocol):
    """Anything with an application for aiohttp."""

    app: web.Application


async def serve_fake(fake: Fake, port: int = 0) -> FakeServer:
    """Serve a fake on the loopback interface; port 0: a free one. ``process.stop`` ends it."""
    runner = web.AppRunner(fake.app, access_log=None, shutdown_timeout=0.1)
    process = FakeProcess(runner)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, bound = runner.addresses[0][:2]
    return FakeServer(f"http://{host}:{bound}", process)


class FakeLauncher:
    """Launches FakeEngines on ``model``; ``engines`` are all that it ever launched, newest last.

    ``configure`` sees each engine before it answers its first request. ``refuse`` holds messages:
    one is taken for each launch that shall fail. ``nonce``: overrides the launch nonce.
    ``decode`` and ``load_s``: as FakeEngine has them.
    """

    def __init__(
        self,
        model: Path,
        *,
        configure: Callable[[FakeEngine], None] = lambda _engine: None,
        delay_s: float = 0.0,
        max_running_requests: int = 128,
        decode: Decode | None = None,
        load_s: float = 0.0,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.processes: list[FakeProcess] = []
        #: what each launch was told to start on.
        self.boots: list[Boot | None] = []
        self.refuse: list[str] = []
        #: why their logs cannot be written now.
        self.disk_fault = ""
        self.nonce: str | None = None
        self._model = model
        self._configure = configure
        self._delay_s = delay_s
        self._max_running_requests = max_running_requests
        self._decode = decode
        self._load_s = load_s

    def log_fault(self) -> str:
        """Tell what the test says."""
        return self.disk_fault

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        """Start an engine on a free port of the loopback interface.

        Weights that cannot be loaded end the process with code 1, as they end SGLang.
        """
        if self.refuse:
            raise EvaldError(self.refuse.pop(0))
        self.boots.append(boot)
        nonce = boot.weight_version if boot else f"launch-{attempt}-{secrets.token_hex(4)}"
        api_key = secrets.token_hex(8)
        try:
            engine = FakeEngine(
                boot.directory if boot else self._model,
                weight_version=self.nonce or nonce,
                api_key=api_key,
                delay_s=self._delay_s,
                max_running_requests=self._max_running_requests,
                decode=self._decode,
                load_s=self._load_s,
                on_death=lambda: process.end(-signal.SIGKILL),
            )
        except (ValueError, OSError, struct.error):
            process = FakeProcess(web.AppRunner(web.Application()))
            process.end(1)
            self.processes.append(process)
            return Launched(
                process=process, url="http://127.0.0.1:9", api_key=None, nonce=nonce, log="(no log)"
            )
        self._configure(engine)
        server = await serve_fake(engine)
        process = server.process
        self.engines.append(engine)
        self.processes.append(process)
        return Launched(
            process=process, url=server.url, api_key=api_key, nonce=nonce, log="(no log)"
        )
