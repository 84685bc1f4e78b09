"""Encoding in a process of its own, which ends when all is encoded.

A tokenizer takes hundreds of megabytes, and its file as much while it is compared with another
one. ``python -m evald.evals.encoding_process PARENT_PID`` reads orders and writes a reply to each:
four bytes of length (big endian), then msgpack. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from evald.config import EvalSet
from evald.errors import EvalSkip
from evald.evals.chat_template import ChatTemplate, PromptError
from evald.evals.encoding import Encoded, Encoding
from evald.evals.prompts import ModelLimits, TokenizerFiles
from evald.evals.rows import Question
from evald.evals.worker import die_with
from evald.text import encode_json, one_line

_HEADER_BYTES = 4
#: questions that travel together, as JSON.
_BATCH_BYTES = 1 << 20
#: one order: a large tokenizer is built in seconds, a long document encoded in a minute.
_ORDER_TIMEOUT_S = 600.0
#: to be gone after the end of its orders.
_END_TIMEOUT_S = 5.0


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Answer with the digest of a tokenizer.json."""

    tokenizer: bytes


class Load(msgspec.Struct, frozen=True, tag=True):
    """Build this tokenizer."""

    tokenizer: bytes
    template: str | None
    special_tokens: dict[str, str]
    limits: ModelLimits


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Encode questions of a set (as JSON: in rows there are numbers that msgpack does not know)."""

    eval_set: bytes
    questions: list[bytes]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an order; ``fault``: why nothing did, "" where it went well."""

    fault: str = ""
    digest: str = ""
    encoded: list[Encoded] = []


class EncodingProcess:
    """Fulfils ``SetEncoder``; the process starts with the first order. For one thread at a time.

    ``close`` may come from another one: what is under way then ends with EvalSkip. A process that
    dies, or takes too long, is a PromptError: what it was given to read has killed it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def digest(self, tokenizer: bytes) -> str:
        """Digest of what a tokenizer.json means; raises PromptError."""
        return self._ask(Digest(tokenizer)).digest

    def load(self, files: TokenizerFiles, limits: ModelLimits) -> None:
        """Build the tokenizer there; raises PromptError."""
        template = files.template
        self._ask(Load(files.content, template.source, template.special_tokens, limits))

    def encode(self, eval_set: EvalSet, questions: Sequence[Question]) -> list[Encoded]:
        """Encode questions; raises PromptError for a fault of the set."""
        packed = encode_json(eval_set)
        encoded: list[Encoded] = []
        for batch in _batches(questions):
            encoded += self._ask(Encode(packed, batch)).encoded
        return encoded

    def close(self) -> None:
        """End the process; nothing is left of it."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # nobody reads what was not sent yet
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)

    def _refuse_closed(self) -> None:
        if self._closed:
            self._end()  # (it may have been started meanwhile)
            raise EvalSkip("cannot encode prompts: nobody wants them any more")

    def _ask(self, order: Digest | Load | Encode) -> Reply:
        """Send one order and wait for its reply; raises PromptError, and EvalSkip without one."""
        self._refuse_closed()
        process = self._process = self._process or _start()
        message = msgspec.msgpack.encode(order)
        timer = threading.Timer(_ORDER_TIMEOUT_S, process.kill)
        timer.start()
        try:
            body = _exchange(process, message)
        finally:
            timer.cancel()
        self._refuse_closed()
        if body is None:
            self._end()
            raise PromptError(
                f"the process that encodes prompts ended with exit code {process.returncode}"
            )
        reply = _replies.decode(body)
        if reply.fault:
            raise PromptError(reply.fault)
        return reply


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - this interpreter, this module
            # -P: a module in the current directory must not stand in for a library
            [sys.executable, "-P", "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # a key pressed at a terminal is the daemon's to judge
            start_new_session=True,
        )
    except OSError as error:
        raise EvalSkip(f"cannot start a process that encodes prompts: {error}") from error


def _exchange(process: subprocess.Popen[bytes], message: bytes) -> bytes | None:
    """Send one message and wait for the next; None when the process, or a pipe to it, is gone."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        _write(process.stdin, message)
        return _read(process.stdout)
    except (OSError, ValueError):  # ValueError: ``close`` has closed it
        return None


def _batches(questions: Sequence[Question]) -> Iterator[list[bytes]]:
    """Pack questions, about a megabyte at a time; one batch at least: a set has faults, too."""
    batch: list[bytes] = []
    size = 0
    for question in questions:
        batch.append(encode_json(question))
        size += len(batch[-1])
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _write(pipe: IO[bytes], body: bytes) -> None:
    pipe.write(len(body).to_bytes(_HEADER_BYTES, "big"))
    pipe.write(body)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Read one message; None at the end."""
    header = pipe.read(_HEADER_BYTES)
    size = int.from_bytes(header, "big")
    body = pipe.read(size)
    return body if len(header) == _HEADER_BYTES and len(body) == size else None


def main() -> None:
    """Serve until nobody asks any more."""
    die_with(int(sys.argv[1]))
    # the daemon decides when this ends: a signal to the whole group must not cost its point
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not land between replies
    encoding = Encoding()
    while (body := _read(sys.stdin.buffer)) is not None:
        try:
            reply = _carry_out(encoding, _orders.decode(body))
        except PromptError as error:
            reply = Reply(fault=one_line(str(error)))
        try:
            _write(replies, msgspec.msgpack.encode(reply))
        except BrokenPipeError:
            os._exit(1)  # (the interpreter would try again at its end)


def _carry_out(encoding: Encoding, order: Digest | Load | Encode) -> Reply:
    match order:
        case Digest(tokenizer):
            return Reply(digest=encoding.digest(tokenizer))
        case Load(tokenizer, template, special_tokens, limits):
            files = TokenizerFiles(tokenizer, ChatTemplate(template, special_tokens))
            encoding.load(files, limits)
            return Reply()
        case Encode(eval_set, questions):
            rows = [_questions.decode(one) for one in questions]
            return Reply(encoded=encoding.encode(_sets.decode(eval_set), rows))


_orders: msgspec.msgpack.Decoder[Digest | Load | Encode]
_orders = msgspec.msgpack.Decoder(Digest | Load | Encode)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_questions: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
_sets: msgspec.json.Decoder[EvalSet] = msgspec.json.Decoder(EvalSet)

if __name__ == "__main__":
    main()
