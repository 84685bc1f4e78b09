"""``[blackbox] class``: a process that holds the user's object, spoken to over a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from evald.config import BlackBox
from evald.engines.own_socket import accept, how_it_ended, listen
from evald.engines.process import EngineProcess
from evald.errors import EvaldError, EvalSkip
from evald.point import SkipReason
from evald.postures.blackbox.process import NAME, Request, Room
from evald.postures.blackbox.results import Skipped, skipped

log = structlog.get_logger(__name__)

_CHILD = Path(__file__).with_name("child.py")
#: between the end of the process and that of its connection, in either order.
_LAST_WORDS_S = 2.0
_MAX_MESSAGE_BYTES = 2**20

_T = TypeVar("_T")


class _Died(EvaldError):
    """The process ended, or said what it must not; ``began``: it had taken the point."""

    def __init__(self, detail: str, *, began: bool) -> None:
        super().__init__(detail)
        self.detail = detail
        self.began = began


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the child."""

    type: str
    reason: str = ""
    detail: str = ""


class ClassBox:
    """Keeps an object of the user's class between points; a fresh one after any crash."""

    def __init__(self, config: BlackBox, room: Room) -> None:
        self._config = config
        self._room = room
        self._child: _Child | None = None

    async def warm_up(self) -> None:
        """Start the process and let it build the object; raises EvalSkip."""
        if self._child is None or not self._child.alive:
            await self._start()

    def leave(self) -> None:
        """Have the process end; the next point gets a fresh one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        self._room.leave()

    async def ask(self, request: Request) -> Skipped | None:
        """Hand the point over; None when results are written. Raises EvalSkip "crashed"."""
        used = self._child
        await self.warm_up()
        try:
            return await self._hand_over(request)
        except _Died as died:
            if died.began or self._child is not used:
                raise EvalSkip(died.detail, reason=SkipReason.CRASHED) from died
            # it died of nothing that this point has done, and only now could that be seen
            log.info("blackbox_replaced", detail=died.detail)
        await self._start()
        try:
            return await self._hand_over(request)
        except _Died as died:
            raise EvalSkip(died.detail, reason=SkipReason.CRASHED) from died

    async def _hand_over(self, request: Request) -> Skipped | None:
        key = request.point.key
        reply = await self._connected().evaluate({
            "dir": str(request.point.snapshot.directory),
            "output": str(request.output),
            "point": {
                "run": key.run,
                "step": key.step,
                "revision": key.revision,
                "kind": key.kind.value,
                "record_id": key.record_id,
                "digest": request.digest,
                "timeout_s": request.limit - asyncio.get_running_loop().time(),
            },
        })  # fmt: skip
        if reply.type == "failed":
            raise EvalSkip(
                f"evaluate_checkpoint raised {reply.detail}; see {self._log_path()}",
                reason=SkipReason.CRASHED,
            )
        return skipped(reply.reason, reply.detail) if reply.type == "skip" else None

    async def _start(self) -> None:
        """Start a process and let it build the object; raises EvalSkip."""
        self.leave()
        try:
            async with asyncio.timeout(self._config.start_timeout_s) as scope:
                self._child = await _Child.launch(self._config, self._room)
                reply = await self._child.build(self._config.config)
        except TimeoutError as error:
            if not scope.expired():
                raise
            detail = f"it was not constructed within {self._config.start_timeout_s:g} s"
            raise self._not_started(detail) from error
        except (EvaldError, OSError) as error:
            raise self._not_started(str(error)) from error
        if reply.type == "skip":
            given = skipped(reply.reason, reply.detail)
            raise EvalSkip(given.detail, reason=given.reason)
        if reply.type == "failed":
            raise self._not_started(reply.detail)

    def _not_started(self, cause: str) -> EvalSkip:
        see = f"; see {self._log_path()}" if self._room.process else ""
        return EvalSkip(
            f"cannot start {self._config.class_}: {cause}{see}", reason=SkipReason.CRASHED
        )

    def _log_path(self) -> str:
        return str(self._room.process.log_path) if self._room.process else "the daemon's log"

    def _connected(self) -> _Child:
        if self._child is None:
            raise ValueError("warm_up() comes first")
        return self._child


class _Child:
    """The connection to a process of the room."""

    def __init__(
        self, process: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def launch(cls, config: BlackBox, room: Room) -> _Child:
        """Start a process and let it connect; raises _Died, EvaldError or OSError."""
        name = f"evald-blackbox-{secrets.token_hex(16)}"
        with contextlib.closing(listen(name)) as listener:
            python = config.python or sys.executable
            process = await room.start([python, str(_CHILD), name, str(config.class_)])
            connection = await _unless_dead(process, accept(listener), began=False)
            reader, writer = await asyncio.open_unix_connection(
                sock=connection, limit=_MAX_MESSAGE_BYTES
            )
        return cls(process, reader, writer)

    @property
    def alive(self) -> bool:
        """Whether it can take a point, as far as can be seen."""
        return not self._reader.at_eof() and not self.process.exited.is_set()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def build(self, config: dict[str, Any]) -> _Reply:
        """Let it construct the object: "ready", "skip" or "failed"; raises _Died."""
        self._send({"config": config})
        return await self._reply({"ready", "skip", "failed"}, began=False)

    async def evaluate(self, message: dict[str, Any]) -> _Reply:
        """Hand over one point: "done", "skip" or "failed"; raises _Died."""
        self._send(message)
        await self._reply({"began"}, began=False)
        return await self._reply({"done", "skip", "failed"}, began=True)

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _reply(self, expected: set[str], *, began: bool) -> _Reply:
        line = await _unless_dead(self.process, self._read_line(), began=began)
        try:
            reply = _replies.decode(line)
        except msgspec.DecodeError:
            reply = _Reply(type=repr(line[:40]))
        if reply.type not in expected:
            raise _Died(f"it said {reply.type} out of turn on evald's own socket", began=began)
        return reply

    async def _read_line(self) -> bytes | None:
        """Read one line; None when the connection is closed."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # reset; or longer than any message
            return None
        return line if line.endswith(b"\n") else None


async def _unless_dead(
    process: EngineProcess, work: Coroutine[Any, Any, _T | None], *, began: bool
) -> _T:
    """Await ``work``, unless the process ends or hangs up (None) first; raises _Died."""
    task = asyncio.create_task(work, name=f"{NAME}-message")
    ended = asyncio.create_task(process.wait(), name=f"{NAME}-exit")
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():  # what it said before it ended counts
            await asyncio.wait((task,), timeout=_LAST_WORDS_S)
        result = task.result() if task.done() else None
        if result is not None:
            return result
        await asyncio.wait((ended,), timeout=_LAST_WORDS_S)
        raise _Died(await how_it_ended(process), began=began)
    finally:
        task.cancel()
        ended.cancel()


_replies: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)
