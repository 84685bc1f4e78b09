"""What the daemon and the process of a user's function say to each other.

Frames on a unix socket: four bytes of length (big endian), then JSON. The daemon begins with Setup;
the process answers Ready or Unready. Then: Begin and Cancel for each sample, answered by Returned,
Raised or (a cancelled one) Gone; and between them Ask for each request to the engines, answered by
Answered or Refused.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from evald.evals.graders.contract import Grade
from evald.text import encode_json

HEADER_BYTES = 4
#: a longer message is none of ours: a conversation of a million tokens takes ten.
MAX_BYTES = 1 << 28


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that stays the same for all samples of a set."""

    function: str
    #: working directory; modules are found there first.
    cwd: str
    config: dict[str, Any]
    #: sampling parameters of the set, all but the seed.
    sampling: dict[str, Any]
    apply_chat_template: Literal["auto"] | bool
    template_kwargs: dict[str, Any]
    #: tag that opens the model's thinking, looked for at a prompt's end; None: not looked for.
    opening_tag: str | None
    #: tokenizer.json, and the chat template with the tokens that it may name.
    tokenizer: bytes
    template: str | None
    special_tokens: dict[str, str]
    vocab_size: int | None
    context_len: int | None


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call the function for one sample; ``call`` is a number from 1."""

    call: int
    id: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: Any
    tools: list[dict[str, Any]]
    sample: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for a call any more."""

    call: int


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engines' answer to one request."""

    request: int
    text: str
    output_ids: list[int]
    finish_reason: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a request has no answer; ``kind`` as GenerationError has it."""

    request: int
    kind: str
    detail: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The function is there."""


class Unready(msgspec.Struct, frozen=True, tag=True):
    """Why the function cannot be used."""

    detail: str


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One request of a call; ``turn`` counts them within the call, from 0."""

    call: int
    request: int
    turn: int
    ids: list[int]
    sampling: dict[str, Any]


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the function returned for a call."""

    call: int
    text: str
    #: None: the set's grader decides.
    grade: Grade | None
    values: dict[str, float]
    messages: list[Any] | None
    #: the text is the last answer's, whose prompt ended inside an open thought.
    in_thought: bool


class Raised(msgspec.Struct, frozen=True, tag=True):
    """What the function raised instead; ``kind``: "timeout" or "error"."""

    call: int
    kind: str
    detail: str


class Gone(msgspec.Struct, frozen=True, tag=True):
    """The call is being cancelled: the process is alive."""

    call: int


ToProcess = Setup | Begin | Cancel | Answered | Refused
ToDaemon = Ready | Unready | Ask | Returned | Raised | Gone


class Malformed(Exception):
    """The other side said what it must not."""


def frame(message: ToProcess | ToDaemon) -> bytes:
    """Pack one message with its length."""
    body = encode_json(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """Read one message, still packed; None at the end. Raises Malformed."""
    try:
        size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
        if size > MAX_BYTES:
            raise Malformed(f"a message of {size} bytes; at most {MAX_BYTES} are allowed")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_for_daemon(body: bytes) -> ToDaemon:
    """Unpack what a process said; raises Malformed."""
    try:
        return _for_daemon.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{error}: {body[:40]!r}") from error


def read_for_process(body: bytes) -> ToProcess:
    """Unpack what the daemon said."""
    return _for_process.decode(body)


_for_daemon: msgspec.json.Decoder[ToDaemon] = msgspec.json.Decoder(ToDaemon)
_for_process: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)
