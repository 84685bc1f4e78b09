"""One engine's processes, seen from the daemon: start, exit, full-tree stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from evald.engines import guard, leftovers
from evald.errors import EvaldError

log = structlog.get_logger(__name__)

#: from the guard's launch to its first line; some 50 ms on an idle machine.
GUARD_START_TIMEOUT_S = 20.0
#: for SIGKILL to take effect on a whole tree, beyond the grace of a stop.
KILL_TIMEOUT_S = 15.0


class EngineProcess:
    """A launcher and everything that it started, under a guard of its own.

    ``pid`` is the launcher's process id, session and process group. ``exited`` is set when the
    launcher has ended, with ``returncode`` (negative: the signal that killed it); the guard then
    kills what it left behind, and ``stop`` returns when nothing is left.
    """

    def __init__(
        self, name: str, log_path: Path, process: asyncio.subprocess.Process, lifeline_fd: int
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.pid = 0
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self._guard = process
        self._lifeline_fd: int | None = lifeline_fd
        self._reported = asyncio.Event()
        self._failure = "its guard ended before the launch; the daemon's own log has its last words"
        #: nothing of the engine is left.
        self._gone = False
        #: shared memory that it may leave behind: removed here only when the guard was killed.
        self._memory: set[Path] = set()
        self._watching = asyncio.create_task(self._watch(), name=f"engine-process:{name}")

    @classmethod
    async def start(
        cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path, *, name: str
    ) -> EngineProcess:
        """Start ``argv`` with exactly ``env``; its output is appended to ``log_path`` (mode 0600).

        Raises EvaldError when that is impossible, OSError when the daemon's own interpreter cannot
        be run. A cancelled start leaves nothing behind.
        """
        async with contextlib.AsyncExitStack() as undo:
            # Our own pipe, not asyncio's: synchronous code can close it at once.
            read_fd, lifeline_fd = os.pipe()
            undo.callback(os.close, lifeline_fd)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", "-S", guard.__file__, str(log_path), "--", *argv),
                    stdin=read_fd,
                    stdout=asyncio.subprocess.PIPE,
                    env=env,
                    start_new_session=True,
                )
            finally:
                os.close(read_fd)
            undo.pop_all()
            engine = cls(name, log_path, process, lifeline_fd)
            undo.push_async_callback(engine._abandon)
            try:
                async with asyncio.timeout(GUARD_START_TIMEOUT_S):
                    await engine._reported.wait()
            except TimeoutError as error:
                raise EvaldError(
                    f"cannot start engine {name}: its guard was silent for "
                    f"{GUARD_START_TIMEOUT_S:.0f} s; is the machine overloaded?"
                ) from error
            if not engine.pid:
                raise EvaldError(f"cannot start engine {name}: {engine._failure}")
            await asyncio.to_thread(leftovers.write_pid_file, log_path, engine.pid)
            undo.pop_all()
        log.info("engine_process_started", engine=name, pid=engine.pid, log=str(log_path))
        return engine

    async def wait(self) -> int:
        """Wait for the end of the launcher (without a deadline) and return its return code."""
        await self.exited.wait()
        if self.returncode is None:
            raise EvaldError(f"cannot wait for engine {self.name}: it was never started")
        return self.returncode

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, ``grace_s`` seconds, SIGKILL for everything; return when nothing is left.

        May be called again, at any time. Raises EvaldError when a process survives SIGKILL for
        KILL_TIMEOUT_S (the kernel holds it: usually a device driver).
        """
        if self._lifeline_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard has ended
                os.write(self._lifeline_fd, f"stop {grace_s:.3f}\n".encode())
        await self._end_of_guard(grace_s + KILL_TIMEOUT_S)
        if not self._gone:
            raise EvaldError(
                f"cannot stop engine {self.name}: processes of group {self.pid} survive SIGKILL; "
                "look at them with ps, the machine may need a restart"
            )

    def kill(self) -> None:
        """Kill the whole tree now, without waiting: for ``finally`` blocks. May be called again."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None
        if self.pid and not self._gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _abandon(self) -> None:
        """Undo a start that failed or was cancelled."""
        self.kill()
        await self._end_of_guard(KILL_TIMEOUT_S)

    async def _end_of_guard(self, timeout_s: float) -> None:
        await asyncio.wait({self._watching}, timeout=timeout_s)
        if self._watching.done():
            self._watching.result()  # raises what only a bug can raise
            return
        log.error("engine_guard_stuck", engine=self.name, guard=self._guard.pid)
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            self._guard.kill()
        await asyncio.wait({self._watching}, timeout=2 * KILL_TIMEOUT_S)

    async def _watch(self) -> None:
        """Follow the guard's lines to its end, and do its work if it was killed."""
        if self._guard.stdout is None:
            raise ValueError("the guard must be started with a pipe as its standard output")
        while line := await self._guard.stdout.readline():
            self._heard(*line.decode().strip().partition(" ")[::2])
        await self._guard.wait()
        self._reported.set()
        if self.pid and not self._gone:
            log.error("engine_guard_died", engine=self.name, returncode=self._guard.returncode)
            left = await asyncio.to_thread(leftovers.kill_group, self.pid, KILL_TIMEOUT_S)
            self._gone = not left
            if self._gone:
                await asyncio.to_thread(leftovers.remove_memory, self._memory)
            self._launcher_ended(-signal.SIGKILL)
        if self._gone:
            await asyncio.to_thread(leftovers.pid_file(self.log_path).unlink, missing_ok=True)

    def _heard(self, word: str, value: str) -> None:
        """Take in one line of the guard."""
        match word:
            case "started":
                self.pid = int(value)
                self._reported.set()
            case "failed":
                self._failure = value
            case "memory":
                self._memory.add(Path(value))
            case "exited":
                self._launcher_ended(int(value))
            case "gone":
                self._gone = True

    def _launcher_ended(self, returncode: int) -> None:
        if self.returncode is None:
            self.returncode = returncode
            log.info("engine_process_exited", engine=self.name, returncode=returncode)
        self.exited.set()
