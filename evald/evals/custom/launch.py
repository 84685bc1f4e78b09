"""The start of a process of user's code: until the function in it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.engines.own_socket import accept, how_it_ended, listen
from evald.engines.process import EngineProcess
from evald.engines.process_log import next_log
from evald.errors import EvaldError
from evald.evals.custom.messages import (
    Malformed,
    Ready,
    Setup,
    Unready,
    frame,
    read_body,
    read_for_daemon,
)

#: from exec until the function is imported: torch from a cold disk.
START_TIMEOUT_S = 120.0
#: between the end of the connection and that of the process.
_LAST_WORDS_S = 2.0
_KEEP_LOGS = 10


class NotStarted(EvaldError):
    """The process did not get ready; the sentence says why."""


class Launched(msgspec.Struct, frozen=True):
    """A process that is ready, under guard, and the connection to it."""

    process: EngineProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    #: path of its board.
    board: Path


async def launch(setup: Setup, *, env: Mapping[str, str], directory: Path) -> Launched:
    """Start a process, with a log in ``directory``, and wait until the function is there.

    Raises NotStarted; then, and when it is cancelled, nothing of it is left.
    """
    try:
        log_path = await asyncio.to_thread(next_log, directory, keep=_KEEP_LOGS)
        board = log_path.with_suffix(".board")
        name = f"evald-custom-{secrets.token_hex(16)}"
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(board.unlink, missing_ok=True)
            with contextlib.closing(listen(name)) as listener:
                process = await EngineProcess.start(
                    [sys.executable, "-P", "-m", "evald.evals.custom.child", name, str(board)],
                    env,
                    log_path,
                    name=setup.function,
                )
                undo.push_async_callback(process.stop, 0.0)
                undo.callback(process.kill)
                async with asyncio.timeout(START_TIMEOUT_S):
                    connection = await _connection(process, listener)
                    reader, writer = await asyncio.open_unix_connection(sock=connection)
                    undo.callback(writer.close)
                    launched = Launched(process, reader, writer, board)
                    await _greet(launched, setup)
            undo.pop_all()
    except TimeoutError as late:
        raise NotStarted(f"it was not imported within {START_TIMEOUT_S:g} s") from late
    except NotStarted:
        raise
    except (EvaldError, OSError) as error:
        raise NotStarted(f"cannot start a process for it: {error}") from error
    return launched


async def last_words(launched: Launched) -> str:
    """Say in words how a process ended that has hung up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await launched.process.exited.wait()
    return await how_it_ended(launched.process)


async def _greet(launched: Launched, setup: Setup) -> None:
    """Say what it is for, and wait until it is ready; raises NotStarted."""
    # (a tokenizer of megabytes is packed)
    message = await asyncio.to_thread(frame, setup)
    with contextlib.suppress(ConnectionError):  # seen where it is read
        launched.writer.write(message)
        await launched.writer.drain()
    try:
        body = await read_body(launched.reader)
        answer = None if body is None else read_for_daemon(body)
    except Malformed as error:
        raise NotStarted(f"it said {error} on evald's own socket") from error
    if answer is None:
        raise NotStarted(await last_words(launched))
    if isinstance(answer, Unready):
        raise NotStarted(answer.detail)
    if not isinstance(answer, Ready):
        raise NotStarted(f"it said {type(answer).__name__} out of turn on evald's own socket")


async def _connection(process: EngineProcess, listener: socket.socket) -> socket.socket:
    """Wait until the process has connected; raises NotStarted when it ends before that."""
    accepting = asyncio.create_task(accept(listener))
    ended = asyncio.create_task(process.exited.wait())
    try:
        await asyncio.wait((accepting, ended), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            return accepting.result()
        raise NotStarted(await how_it_ended(process))
    finally:
        accepting.cancel()
        ended.cancel()
