"""The contract of ``kind = "custom"``: ``function = "module:function"``.

.. code-block:: python

    from evald.custom import Client, Question, Result


    async def generate(client: Client, question: Question) -> str | Result:
        messages = [{"role": "user", "content": question.prompt}]
        answer = await client.generate(messages)
        while call := tool_call(answer.text):
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "tool", "content": await use(call)},
            ]
            answer = await client.generate(messages)
        return Result(answer.text, messages=messages)

A config of miles or slime names such a function in ``custom_generate_function_path``; the signature
is always this one, not theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

#: text, chat messages, or token ids.
Prompt = str | list[dict[str, Any]] | list[int]


class GenerationError(Exception):
    """The engines gave no answer to one request.

    ``kind``: "too_long" (prompt and max_new_tokens do not fit into the context), "prompt" (the
    prompt cannot become token ids), "rejected" (the server refused the request), "timeout" or
    "error". A function may catch it; one that does not fails the sample with the sentence.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


@dataclasses.dataclass(frozen=True)
class Question:
    """One sample of one row of the data set."""

    id: str
    #: text or chat messages, as the row has it.
    prompt: str | list[dict[str, Any]]
    #: the reference, as the row has it at ``label_key``; None without one. It is here for
    #: environments: what is told to the model of it is the function's own affair.
    label: Any
    #: what the row has at ``metadata_key``.
    metadata: Any
    #: what the row has at ``tool_key``.
    tools: list[dict[str, Any]]
    #: number of the sample, 0 ... n_samples_per_eval_prompt - 1.
    sample: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of the model."""

    text: str
    output_ids: list[int]
    #: "stop", or "length": max_new_tokens were reached.
    finish_reason: str
    #: token ids that the model was asked with: to go on exactly where it ended, ask with
    #: ``answer.prompt_ids + answer.output_ids + more``.
    prompt_ids: list[int]


@dataclasses.dataclass
class Result:
    """What came of one sample."""

    #: goes to the set's grader, and into the samples file.
    text: str
    #: a finite number, true or false: the function grades by itself, the set's grader does not.
    score: Any = None
    #: with a score: the answer in one form, equal ones vote together (maj@k).
    answer: str = ""
    #: with a score: there is no answer in the response, which counts apart.
    no_answer: bool = False
    #: with a score: for people.
    reason: str = ""
    #: further finite numbers; their means become ``eval/{set}/{name}``. A name has small letters,
    #: digits and ``_``, 64 at most, and is none that evald writes itself (``stderr``, ``*_ratio``).
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    #: the conversation (anything that JSON can hold), kept in the samples file.
    messages: list[Any] | None = None


class Client(Protocol):
    """The engines, bound to the point's weights and to one sample."""

    #: ``function_config.config`` of the eval set.
    config: dict[str, Any]
    #: tokens of a prompt with its answer; None: not known.
    context_len: int | None

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: list[dict[str, Any]] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Ask the model once.

        Chat messages are wrapped in the model's chat template, with ``tools`` (None: the
        question's own); text is treated as the set's prompts are (``apply_chat_template``).

        ``sampling`` (``max_new_tokens``, ``min_new_tokens``, ``temperature``, ``top_p``,
        ``top_k``, ``min_p``, ``stop``, ``stop_token_ids``, ``json_schema``, ``regex``, ...: the
        names of SGLang) goes over the set's own parameters. The seed is a stable hash of set,
        question, sample and the number of the request within the sample.

        Raises GenerationError.
        """
        ...

    async def encode(
        self, prompt: str | list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Give the token ids that ``generate`` would ask with; raises GenerationError."""
        ...


#: the function: called once for each sample, many at a time, in one event loop.
Generate = Callable[[Client, Question], Awaitable[str | Result]]
