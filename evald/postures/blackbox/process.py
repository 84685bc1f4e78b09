"""The processes of a black box: one at a time, under guard, each with a log of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from evald.config import BlackBox
from evald.engines import guard, leftovers
from evald.engines.environment import cache_env, inherited_env
from evald.engines.process import EngineProcess
from evald.engines.process_log import next_log
from evald.errors import EvaldError
from evald.point import EvalPoint, PointKey
from evald.postures.blackbox.results import RESULTS_NAME, Skipped

log = structlog.get_logger(__name__)

NAME = "blackbox"
#: environment variable of everything that a black box starts: the directory of its logs.
MARK = "EVALD_BLACKBOX"
#: how long killed leftovers may take to disappear, and how often that is looked at.
_REAP_TIMEOUT_S = 15.0
_REAP_STEP_S = 0.05


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a point."""

    point: EvalPoint
    digest: str
    #: made for this attempt, empty.
    output_dir: Path
    #: when it is killed, in the loop's time.
    limit: float

    @property
    def output(self) -> Path:
        """Where the results are to be written."""
        return self.output_dir / RESULTS_NAME


class Box(Protocol):
    """A class or a command, asked about one point at a time."""

    async def warm_up(self) -> None:
        """Do what can be done before the first point; raises EvalSkip."""

    def leave(self) -> None:
        """Have the process end, if there is one; does not wait."""

    async def ask(self, request: Request) -> Skipped | None:
        """Evaluate; None when results are written. Raises EvalSkip "crashed"."""


class Room:
    """Where the one process of a black box is: empty before the next one may start.

    ``env`` is its environment, ``directory`` that of its logs.
    """

    def __init__(self, config: BlackBox, env: Mapping[str, str], directory: Path) -> None:
        self._config = config
        self._env = {**env, MARK: str(directory)}
        self._directory = directory
        self.process: EngineProcess | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self, argv: list[str]) -> EngineProcess:
        """Start ``argv`` in the configured directory once the room is empty.

        Raises EvaldError or OSError.
        """
        self.leave()
        await self.empty()
        log_path = await asyncio.to_thread(next_log, self._directory, keep=self._config.keep_logs)
        # env, not a shell; what it cannot find is in the log in its words, with exit code 127
        inside = ["/usr/bin/env", "-C", self._config.cwd, "--", *argv]
        self.process = await EngineProcess.start(inside, self._env, log_path, name=NAME)
        return self.process

    def leave(self) -> None:
        """Have the process end: SIGTERM, its grace, SIGKILL for all that is left; does not wait."""
        process, self.process = self.process, None
        if process is not None:
            task = asyncio.create_task(self._end(process), name=f"{NAME}-end")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def empty(self) -> None:
        """Wait until nothing is left of what has left; the grace and SIGKILL bound that."""
        while self._leaving:
            await asyncio.wait(set(self._leaving))

    async def _end(self, process: EngineProcess) -> None:
        try:
            await process.stop(self._config.stop_grace_s)
        except EvaldError as error:
            log.error("blackbox_not_stopped", detail=str(error))  # noqa: TRY400
            # (no traceback: the sentence is complete)
        finally:
            process.kill()


def new_output(directory: Path, key: PointKey, *, keep: int) -> Path:
    """Make an empty directory for one attempt at a point; the newest ``keep`` stay.

    What an earlier attempt has left can never be taken for the results of this one. Blocks; raises
    OSError.
    """
    outputs = directory / "outputs"
    outputs.mkdir(parents=True, exist_ok=True)
    known = sorted(p for p in outputs.iterdir() if re.match(r"\d{6}-", p.name))
    for path in known[: max(len(known) + 1 - keep, 0)]:
        shutil.rmtree(path, ignore_errors=True)
    number = int(known[-1].name[:6]) + 1 if known else 1
    path = outputs / f"{number:06d}-{key.run}-{key.kind.value}_{key.step}.r{key.revision}"
    path.mkdir()
    return path


def environment(config: BlackBox, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the daemon's environment that a black box may see, and its own."""
    env = {"PYTHONUNBUFFERED": "1", **cache_env(environ)}
    return env | inherited_env(environ, config.pass_env) | config.env


def reap(directory: Path) -> None:
    """Kill what a daemon that died together with its guards has left. Blocks.

    What a user's program starts may have left its process group, but hardly its environment.
    """
    leftovers.reap_leftovers(directory)
    mark = f"{MARK}={directory}".encode()
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while left := [pid for pid in guard.all_pids() if _is_marked(pid, mark)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.error("blackbox_leftovers_stay", pids=left)
            return
        log.warning("blackbox_leftovers_killed", pids=left)
        time.sleep(_REAP_STEP_S)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return mark in content.split(b"\0")
