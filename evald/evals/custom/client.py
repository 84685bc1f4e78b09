"""The client of one sample, in the process of the user's function."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable
from typing import Any

from evald.custom import Answer, GenerationError, Prompt
from evald.evals.chat_template import ChatTemplate, PromptError
from evald.evals.custom.messages import Answered, Setup
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles

#: what SGLang knows beside what every set says; the seed and ``n`` are evald's.
_FURTHER = frozenset({
    "json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "logit_bias",
    "custom_params",
})  # fmt: skip


class Encoder:
    """Makes token ids of prompts, for all samples; the tokenizer is built with the first one."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = asyncio.Lock()
        self._encoder: PromptEncoder | None = None

    async def encode(
        self, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Give the token ids, off the event loop; raises PromptError."""
        # (one at a time: a template's sandbox counts the turns of one rendering)
        async with self._lock:
            return await asyncio.to_thread(self._encode, prompt, tools)

    async def opens_thought(self, ids: list[int]) -> bool:
        """Whether the prompt ends with the tag that opens the model's thinking."""
        tag = self._setup.opening_tag
        if tag is None:
            return False
        async with self._lock:
            return await asyncio.to_thread(lambda: self._built().ends_with(ids, tag))

    def _encode(self, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        kwargs = self._setup.template_kwargs
        return self._built().encode(
            prompt,
            apply_chat_template=self._setup.apply_chat_template,
            kwargs={**kwargs, "tools": tools} if tools else kwargs,
            max_response_len=0,
        )

    def _built(self) -> PromptEncoder:
        if self._encoder is None:
            setup = self._setup
            template = ChatTemplate(setup.template, setup.special_tokens)
            self._encoder = PromptEncoder(
                TokenizerFiles(setup.tokenizer, template),
                # how long a prompt may be depends on the answer: the daemon looks at it
                ModelLimits(setup.vocab_size),
            )
        return self._encoder


#: sends one request (its number within the sample, token ids, sampling parameters).
Send = Callable[[int, list[int], dict[str, Any]], Awaitable[Answered]]


class SampleClient:
    """Fulfils ``evald.custom.Client``."""

    def __init__(
        self, setup: Setup, encoder: Encoder, tools: list[dict[str, Any]], send: Send
    ) -> None:
        self.config: dict[str, Any] = setup.config
        self.context_len = setup.context_len
        self.last: Answer | None = None
        self._setup = setup
        self._encoder = encoder
        self._tools = tools
        self._send = send
        self._turns = 0

    async def generate(
        self, prompt: Prompt, *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> Answer:
        """Ask the model once; see the contract."""
        parameters = self._setup.sampling | self._checked(sampling)
        # counted before anything is awaited: requests made at once have numbers in their order
        turn, self._turns = self._turns, self._turns + 1
        ids = await self._ids(prompt, tools)
        answered = await self._send(turn, ids, parameters)
        self.last = Answer(answered.text, answered.output_ids, answered.finish_reason, ids)
        return self.last

    async def encode(
        self, prompt: str | list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Give the token ids that ``generate`` would ask with."""
        try:
            return await self._encoder.encode(prompt, self._tools if tools is None else tools)
        except PromptError as error:
            raise GenerationError("prompt", str(error)) from error

    async def _ids(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> list[int]:
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            return [int(item) for item in prompt if isinstance(item, int)]
        if isinstance(prompt, str):
            return await self.encode(prompt, tools=tools)
        if isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt):
            messages = [item for item in prompt if isinstance(item, dict)]
            return await self.encode(messages, tools=tools)
        raise TypeError("the prompt must be text, a list of chat messages, or a list of token ids")

    def _checked(self, sampling: dict[str, Any]) -> dict[str, Any]:
        known = (self._setup.sampling.keys() | _FURTHER) - {"n"}
        unknown = next((name for name in sampling if name not in known), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {sorted(known)}"
            raise TypeError(f"generate() has no sampling parameter {unknown!r}{hint}")
        return sampling
