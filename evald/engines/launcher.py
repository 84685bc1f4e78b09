"""Where an engine's server comes from: injectable, so that fakes run under the same care."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec


class Process(Protocol):
    """The process of an engine, with everything that it started."""

    @property
    def pid(self) -> int | None:
        """Process id of the server; None: it is not on this machine, or not ours to know."""

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""

    async def wait(self) -> int:
        """Wait for the server's end; its exit code."""

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL after ``grace_s``; return when nothing is left."""

    def kill(self) -> None:
        """Kill everything now, without waiting."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What to start on instead of the base model, and the weight version that it gets."""

    directory: Path
    weight_version: str


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was launched, or one that was there; it is not ready yet."""

    process: Process
    #: ``http://host:port``.
    url: str
    api_key: str | None
    #: weight version that it was launched with: proves that the server behind the port is ours.
    #: None: it is somebody else's, on purpose.
    nonce: str | None
    #: where its log is, for messages.
    log: str = ""


class Launcher(Protocol):
    """Launches the server of one engine, or attaches to it."""

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        """Start the server's process; raises EvaldError or OSError.

        ``attempt`` counts from 1. ``boot``: start on these weights; None: on the base model.
        """

    def log_fault(self) -> str:
        """Say in one sentence why its log cannot be written now; empty: it can. Blocks."""
