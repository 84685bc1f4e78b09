"""The process of a user's generate function: many samples at a time, in one event loop.

``python -m evald.evals.custom.child SOCKET BOARD``: an abstract unix socket on which the daemon
listens (``messages``), and the path of the board (``board``). What the function prints goes where
standard output goes, into a log file.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import traceback
from pathlib import Path

import msgspec

from evald.custom import Generate, GenerationError, Question
from evald.evals.custom.board import CALL, Board
from evald.evals.custom.client import Encoder, SampleClient
from evald.evals.custom.function import Unusable, load_function
from evald.evals.custom.messages import (
    Answered,
    Ask,
    Begin,
    Cancel,
    Gone,
    Raised,
    Ready,
    Refused,
    Setup,
    ToDaemon,
    Unready,
    frame,
    read_body,
    read_for_process,
)
from evald.evals.custom.returned import returned
from evald.evals.graders.contract import GraderFailed
from evald.evals.graders.python import in_words

#: tracebacks that one process writes into its log; a broken tool raises for every sample.
_MAX_TRACEBACKS = 50
#: how long cancelled samples have to clean up once the daemon has hung up.
_END_S = 3.0


class Child:
    """The connection to the daemon, and the samples that are under way."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, setup: Setup
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._setup = setup
        self._encoder = Encoder(setup)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, asyncio.Future[Answered]] = {}
        self._numbers = itertools.count(1)
        self._tracebacks = 0

    async def run(self, function: Generate) -> None:
        """Serve until the daemon hangs up."""
        while (body := await read_body(self._reader)) is not None:
            match read_for_process(body):
                case Begin() as begin:
                    self._begin(function, begin)
                case Cancel(call):
                    if call in self._calls:
                        self._calls[call].cancel()
                    self._say(Gone(call))
                case Answered() as answered:
                    self._answer(answered)
                case Refused() as refused:
                    self._refuse(refused)
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    def _begin(self, function: Generate, begin: Begin) -> None:
        token = CALL.set(begin.call)
        task = asyncio.create_task(self._call(function, begin), name=f"call {begin.call}")
        CALL.reset(token)
        self._calls[begin.call] = task
        task.add_done_callback(lambda _: self._calls.pop(begin.call))

    async def _call(self, function: Generate, begin: Begin) -> None:
        client = SampleClient(
            self._setup,
            self._encoder,
            begin.tools,
            lambda turn, ids, sampling: self._ask(begin.call, turn, ids, sampling),
        )
        question = Question(
            begin.id, begin.prompt, begin.label, begin.metadata, begin.tools, begin.sample
        )
        try:
            result = await function(client, question)
            last = client.last
            opened = (
                last is not None
                and getattr(result, "text", result) == last.text
                and await self._encoder.opens_thought(last.prompt_ids)
            )
            message: ToDaemon = returned(begin.call, result, in_thought=opened)
        except GenerationError as error:
            kind = "timeout" if error.kind == "timeout" else "error"
            message = Raised(begin.call, kind, error.detail)
        except GraderFailed as failed:
            message = Raised(begin.call, "error", f"{self._setup.function}: {failed}")
        # user code: whatever it raises fails this sample only
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
            self._log(begin, error)
            what = f"{self._setup.function} raised {in_words(error)}"
            message = Raised(begin.call, "error", what)
        self._say(message)

    async def _ask(
        self, call: int, turn: int, ids: list[int], sampling: dict[str, object]
    ) -> Answered:
        """Send one request to the engines; raises GenerationError."""
        request = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._requests[request] = future
        try:
            self._say(Ask(call=call, request=request, turn=turn, ids=ids, sampling=sampling))
            await self._writer.drain()
            answered: Answered = await future
        finally:
            del self._requests[request]
        return answered

    def _answer(self, answered: Answered) -> None:
        future = self._requests.get(answered.request)
        if future is not None and not future.done():
            future.set_result(answered)

    def _refuse(self, refused: Refused) -> None:
        future = self._requests.get(refused.request)
        if future is not None and not future.done():
            future.set_exception(GenerationError(refused.kind, refused.detail))

    def _say(self, message: ToDaemon) -> None:
        self._writer.write(frame(message))

    def _log(self, begin: Begin, error: BaseException) -> None:
        self._tracebacks += 1
        if self._tracebacks <= _MAX_TRACEBACKS:
            print(f"question {begin.id}, sample {begin.sample}:", file=sys.stderr)  # noqa: T201
            # (standard error is the log)
            traceback.print_exception(error)
            sys.stderr.flush()


async def main(socket_name: str, board_path: str) -> None:
    """Connect, import the function, serve."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_unix_connection(f"\0{socket_name}")
    try:
        body = await read_body(reader)
        if body is None:
            return
        setup = msgspec.json.decode(body, type=Setup)
        board = Board(Path(board_path))
        loop.set_task_factory(board.factory)
        try:
            function = load_function(setup.function, setup.cwd)
        except Unusable as fault:
            writer.write(frame(Unready(str(fault))))
            await writer.drain()
            return
        writer.write(frame(Ready()))
        await Child(reader, writer, setup).run(function)
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
