"""Who is at work in a process of user's code, readable also when that process has died.

A process that runs many samples at a time dies, or stands still, because of one of them. Which one
is written down before each step of a coroutine, and wiped off behind it: eight bytes of a small
file that is mapped into memory.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

#: number of the call that the running code belongs to; its tasks inherit it.
CALL: ContextVar[int] = ContextVar("CALL", default=0)

_NUMBER = struct.Struct("<q")
NOBODY = 0

#: what a task runs.
Steps = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class Board:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(_NUMBER.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _NUMBER.size)
        self._kept = False

    def write(self, call: int) -> None:
        """Say that a step of ``call`` begins; NOBODY: that none is under way."""
        if not self._kept:
            _NUMBER.pack_into(self._map, 0, call)

    def keep(self) -> None:
        """Leave what is written: the process ends because of it, whatever it still does."""
        self._kept = True

    def factory(
        self, loop: asyncio.AbstractEventLoop, coroutine: Steps, /, **options: Any
    ) -> asyncio.Task[Any]:
        """Make a task (as a loop's task factory) whose steps are written down."""
        return asyncio.Task(_Watched(coroutine, CALL.get(), self), loop=loop, **options)


def at_work(path: Path) -> int:
    """Return the call whose step was under way, or NOBODY. Blocking, microseconds."""
    try:
        content = path.read_bytes()
    except OSError:
        return NOBODY
    if len(content) != _NUMBER.size:
        return NOBODY
    (call,) = _NUMBER.unpack(content)
    return int(call)


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are written down."""

    def __init__(self, inner: Steps, call: int, board: Board) -> None:
        self._inner = inner
        self._call = call
        self._board = board

    def __await__(self) -> Any:
        return self

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(
        self,
        typ: Any,
        val: BaseException | object = None,
        tb: TracebackType | None = None,  # noqa: ARG002 - the contract of coroutines
    ) -> Any:
        # (three arguments are deprecated)
        return self._step(self._inner.throw, typ if val is None else val)

    def close(self) -> None:
        self._inner.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        self._board.write(self._call)
        try:
            return step(value)
        except (SystemExit, KeyboardInterrupt):
            # the event loop lets these end the process
            self._board.keep()
            raise
        finally:
            self._board.write(NOBODY)
