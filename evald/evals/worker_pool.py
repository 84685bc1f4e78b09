"""CPU work off the event loop: worker processes that can be killed, and cost one job only.

A worker is killed when one job takes longer than its deadline, and another one is started for the
next.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec
import structlog

from evald.errors import EvaldError
from evald.evals.worker import HEADER_BYTES, Job, Order, Reply, frame

log = structlog.get_logger(__name__)

#: from exec to "ready"; importing sympy from a cold disk takes seconds.
_START_TIMEOUT_S = 60.0
#: to be gone after SIGKILL or EOF.
_STOP_TIMEOUT_S = 10.0
#: starts that fail in a row before workers are given up for a while.
_MAX_FAILED_STARTS = 3
_BROKEN_S = 60.0


class WorkerFailed(EvaldError):
    """The worker did not do the job: it failed, died, or ran out of time."""


class WorkerTimedOut(WorkerFailed):
    """The job took too long; its worker was killed."""


class Workers(Protocol):
    """Whoever does jobs."""

    async def run(self, job: Job, *, timeout_s: float) -> msgspec.Raw:
        """Do one job and return its result, still packed; raises WorkerFailed."""
        ...

    async def close(self) -> None:
        """End; nothing is left afterwards."""
        ...


class WorkerPool:
    """Runs jobs in at most ``size`` processes, started when the first one is needed.

    ``preload``: what workers import before they say that they are ready (see ``worker.main``).
    ``env``: their environment; None: the daemon's own.
    """

    def __init__(
        self,
        *,
        size: int = 2,
        preload: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._preload = preload
        self._env = env
        self._turns = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._dying: list[_Worker] = []
        self._failed_starts = 0
        self._broken_until_s = 0.0

    async def run(self, job: Job, *, timeout_s: float) -> msgspec.Raw:
        """Do one job and return its result, still packed; raises WorkerFailed.

        ``timeout_s`` runs from when a worker takes the job.
        """
        async with self._turns:
            worker = self._take_idle() or await self._start()
            try:
                reply = await worker.ask(job, timeout_s)
            finally:
                self._put_back(worker)
        if reply.failure is not None:
            raise WorkerFailed(reply.failure)
        return reply.result

    async def close(self) -> None:
        """End all workers; none is left afterwards."""
        for worker in self._idle:
            worker.end()
        gone, self._dying, self._idle = self._dying + self._idle, [], []
        await asyncio.gather(*(worker.wait() for worker in gone))

    def _take_idle(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if not worker.gone:
                return worker
        return None

    async def _start(self) -> _Worker:
        now = asyncio.get_running_loop().time()
        if now < self._broken_until_s:
            raise WorkerFailed("cannot grade: worker processes do not start, see the log")
        worker = _Worker()
        try:
            await worker.start(self._preload, self._env)
        except WorkerFailed as failed:
            self._failed_starts += 1
            log.warning("worker_start_failed", detail=str(failed), failures=self._failed_starts)
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._failed_starts = 0
                self._broken_until_s = now + _BROKEN_S
            raise
        finally:
            if not worker.usable:
                self._put_back(worker)
        self._failed_starts = 0
        return worker

    def _put_back(self, worker: _Worker) -> None:
        self._dying = [dying for dying in self._dying if not dying.gone]
        if worker.usable:
            self._idle.append(worker)
        else:
            worker.kill()
            self._dying.append(worker)


class _Worker:
    """One worker process. ``usable``: it is running and owes no answer."""

    def __init__(self) -> None:
        self.usable = False
        self._orders = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def gone(self) -> bool:
        """The process has ended and was waited for."""
        return self._process is None or self._process.returncode is not None

    async def start(self, preload: tuple[str, ...], env: Mapping[str, str] | None) -> None:
        """Start and wait until it is ready; raises WorkerFailed."""
        try:
            # -P: a module in the current directory must not stand in for a library
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "evald.evals.worker_keeper",
                *preload,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=env,
                # a key pressed at a terminal is the daemon's to judge
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerFailed(f"cannot start a worker process: {error}") from error
        reply = await self._exchange(b"", _START_TIMEOUT_S)
        if reply.failure is not None:
            raise WorkerFailed(reply.failure)
        self.usable = True

    async def ask(self, job: Job, timeout_s: float) -> Reply:
        """Get the answer to one job; raises WorkerFailed, and then the worker is of no more use."""
        # if anything ends the wait, cancellation too, an answer is still owed: not usable again
        self.usable = False
        self._orders += 1
        reply = await self._exchange(frame(Order(self._orders, job)), timeout_s)
        if reply.number != self._orders:
            # one score too many would give every later sample that of the one before it
            raise WorkerFailed("the worker process answered out of turn and was killed")
        self.usable = True
        return reply

    async def _exchange(self, message: bytes, timeout_s: float) -> Reply:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise WorkerFailed("cannot grade: the worker process is not running")
        try:
            async with asyncio.timeout(timeout_s):
                if message:
                    process.stdin.write(message)
                    await process.stdin.drain()
                header = await process.stdout.readexactly(HEADER_BYTES)
                body = await process.stdout.readexactly(int.from_bytes(header, "big"))
        except TimeoutError:
            raise WorkerTimedOut(f"it took longer than {timeout_s:g} s and was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerFailed("the worker process died while it worked") from error
        try:
            return _replies.decode(body)
        except msgspec.DecodeError as error:
            raise WorkerFailed("the worker process answered no reply and was killed") from error

    def kill(self) -> None:
        """Have its keeper kill it and all that it has started; does not wait."""
        self.usable = False
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """Let an idle worker end by itself (EOF); does not wait."""
        self.usable = False
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def wait(self) -> None:
        """Wait until the process is gone, killing it when it does not go."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("worker_not_gone", pid=self._process.pid)
            if self._process.returncode is None:
                self._process.kill()


_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
