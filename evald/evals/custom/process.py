"""One process of a user's generate function, seen from the daemon."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from evald.errors import EvaldError, GenerationFailed
from evald.evals.custom.board import NOBODY, at_work
from evald.evals.custom.calls import Call, Lost, Outcome, Serve
from evald.evals.custom.launch import Launched, last_words
from evald.evals.custom.messages import (
    Answered,
    Ask,
    Begin,
    Cancel,
    Gone,
    Malformed,
    Raised,
    Ready,
    Refused,
    Returned,
    Setup,
    ToProcess,
    Unready,
    frame,
    read_body,
    read_for_daemon,
)
from evald.evals.rows import Question

log = structlog.get_logger(__name__)

#: for a process to say that it lives, once a sample has run out of time.
ALIVE_TIMEOUT_S = 10.0
#: between hanging up and SIGKILL.
END_GRACE_S = 5.0


class FunctionProcess:
    """Runs many samples at a time; once it has ended it is of no more use.

    ``n_done`` counts the samples that it has finished, well or not.
    """

    def __init__(self, setup: Setup, launched: Launched) -> None:
        self.n_done = 0
        self._setup = setup
        self._launched = launched
        self._process = launched.process
        self._writer = launched.writer
        self._calls: dict[int, Call] = {}
        self._last_call = 0
        self._ended = False
        self._listening = asyncio.create_task(self._listen(), name=f"{setup.function} listens")

    @property
    def usable(self) -> bool:
        """Whether it takes samples."""
        return not self._ended

    async def call(
        self, question: Question, sample: int, serve: Serve, *, timeout_s: float
    ) -> Outcome:
        """Call the function once; ``timeout_s`` covers everything that it does.

        Raises GenerationFailed for the sample's own fault, Lost when the process ended meanwhile,
        and whatever else ``serve`` raises.
        """
        self._last_call += 1
        call = self._calls[self._last_call] = Call(self._last_call, serve)
        try:
            await self._send(
                Begin(
                    call=call.number,
                    id=question.id,
                    prompt=question.prompt,
                    label=question.label,
                    metadata=question.metadata,
                    tools=question.tools,
                    sample=sample,
                )
            )
            # (what waits for a future itself would cancel it)
            done, _ = await asyncio.wait((call.outcome,), timeout=timeout_s)
            if not done:
                await self._give_up(call)
                raise GenerationFailed(
                    "timeout", f"{self._setup.function} took longer than {timeout_s:g} s"
                )
            return call.outcome.result()
        finally:
            del self._calls[call.number]
            call.end()
            if self.usable and not call.outcome.done() and not call.gone.is_set():
                # nobody waits for it any more, and a cancelled task has no time to await anything
                self._write(Cancel(call.number))

    def kill(self) -> None:
        """Kill it, and all that it has started; does not wait."""
        self._ended = True
        self._writer.close()
        self._process.kill()

    async def close(self) -> None:
        """Hang up, let it clean up within a grace, and wait until nothing of it is left."""
        try:
            self._ended = True
            self._listening.cancel()
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_GRACE_S):
                    await self._process.exited.wait()
            await self._process.stop(0.0)
        except EvaldError as error:
            log.error("function_not_stopped", detail=str(error))  # noqa: TRY400
            # (no traceback: the sentence is complete)
        finally:
            self.kill()
            self._launched.board.unlink(missing_ok=True)

    async def _listen(self) -> None:
        """Take in what it says until it ends, and tell all calls that it has."""
        detail = ""
        try:
            while (body := await read_body(self._launched.reader)) is not None:
                self._heard(read_for_daemon(body))
        except Malformed as error:
            detail = f"it said {error} on evald's own socket"
        was_killed, self._ended = self._ended, True
        blamed = at_work(self._launched.board)
        detail = detail or await last_words(self._launched)
        self.kill()
        if not was_killed:
            self._lose(f"its process is gone: {detail}", blamed)

    def _heard(self, message: Ask | Returned | Raised | Gone | Ready | Unready) -> None:
        if isinstance(message, Ready | Unready):
            raise Malformed("whether it is ready, again,")
        call = self._calls.get(message.call)
        if call is None:
            return  # nobody waits for it any more
        match message:
            case Ask():
                request = self._answer(call, message)
                call.watch(asyncio.create_task(request, name=f"request {message.request}"))
            case Returned():
                self.n_done += 1
                call.returned(message)
            case Raised(_, kind, detail):
                self.n_done += 1
                sentence = f"{detail}; see {self._process.log_path}"
                call.fail(GenerationFailed(kind, sentence))
            case Gone():
                call.gone.set()

    async def _answer(self, call: Call, ask: Ask) -> None:
        """Have one request answered; what ends the point is raised."""
        try:
            self._check(ask)
            generation = await call.serve(ask)
        except GenerationFailed as failed:
            await self._send(Refused(ask.request, failed.kind, failed.detail))
            return
        call.answered(generation)
        await self._send(
            Answered(
                request=ask.request,
                text=generation.text,
                output_ids=generation.output_ids,
                finish_reason=generation.finish_reason,
            )
        )

    def _check(self, ask: Ask) -> None:
        """Raise GenerationFailed for what the server would refuse, or what would kill it."""
        vocab_size, context_len = self._setup.vocab_size, self._setup.context_len
        if not ask.ids or min(ask.ids) < 0 or (vocab_size and max(ask.ids) >= vocab_size):
            raise GenerationFailed(
                "prompt", "the prompt is empty, or has a token id that the model does not have"
            )
        wanted = ask.sampling.get("max_new_tokens")
        if not isinstance(wanted, int) or wanted < 1:
            raise GenerationFailed("rejected", f"max_new_tokens must be at least 1, got {wanted!r}")
        if context_len is not None and len(ask.ids) + wanted > context_len:
            raise GenerationFailed(
                "too_long",
                f"the prompt has {len(ask.ids)} tokens, and with max_new_tokens = {wanted} that is "
                f"more than the model's context of {context_len}",
            )

    async def _give_up(self, call: Call) -> None:
        """Have a call cancelled that ran out of time; a process that does not listen is killed.

        Raises Lost when the process ends through another's fault.
        """
        await self._send(Cancel(call.number))
        gone = asyncio.create_task(call.gone.wait())
        try:
            await asyncio.wait(
                (gone, call.outcome),
                timeout=ALIVE_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            gone.cancel()
        if not call.gone.is_set() and not call.outcome.done():
            blamed = at_work(self._launched.board)
            self.kill()
            self._lose(
                f"its process did nothing else for {ALIVE_TIMEOUT_S:g} s and was killed; await "
                "what takes long, or use asyncio.to_thread",
                blamed,
            )
        error = call.outcome.exception() if call.outcome.done() else None
        if isinstance(error, Lost) and not error.is_own:
            raise error

    def _lose(self, detail: str, blamed: int) -> None:
        log.warning(
            "function_process_lost",
            function=self._setup.function,
            samples=len(self._calls),
            detail=detail,
        )
        for call in self._calls.values():
            call.fail(Lost(detail, is_own=call.number == blamed, is_unclear=blamed == NOBODY))

    async def _send(self, message: ToProcess) -> None:
        self._write(message)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def _write(self, message: ToProcess) -> None:
        # (a lost connection is noticed where it is read)
        if not self._writer.transport.is_closing():
            self._writer.write(frame(message))
