"""Kind ``generate``: the model writes a response to a prompt, and a grader reads it."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.config import EvalSet
from evald.evals.graders import check_grader, label_problem, opening_tag
from evald.evals.kinds.contract import Answer, Asker
from evald.evals.prompts import PromptEncoder
from evald.evals.rows import BadRow, Question, prompt_fault, take, template_kwargs
from evald.evals.sampling import check_stop, sampling_for
from evald.evals.token_ids import pack, unpack


class EncodedPrompt(msgspec.Struct, frozen=True, tag=True):
    """A prompt as the engines see it."""

    #: packed token ids.
    ids: bytes
    #: it ends with a tag that opens the model's thinking.
    in_thought: bool = False


class Generate:
    """All samples of one question go out as one list request."""

    single = False
    apart = False

    def __init__(self, eval_set: EvalSet) -> None:
        self._set = eval_set

    def check(self) -> list[str]:
        """One sentence for each fault of grader and stop strings."""
        return check_grader(self._set) + check_stop(self._set)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take prompt and reference; raises BadRow."""
        key = self._set.input_key
        prompt = take(row, key, "input_key")
        if fault := prompt_fault(prompt):
            raise BadRow(f"key {key!r}: {fault}")
        if isinstance(prompt, list) and self._set.apply_chat_template is False:
            raise BadRow(
                f"key {key!r} is a list of chat messages, but apply_chat_template is false; set "
                'it to "auto", or give text'
            )
        label = take(row, self._set.label_key, "label_key")
        if fault := label_problem(self._set, label):
            raise BadRow(f"key {self._set.label_key!r}: {fault}")
        return {"prompt": prompt, "label": label}

    def encode(self, encoder: PromptEncoder, question: Question) -> EncodedPrompt:
        """Token ids of the prompt; raises PromptError."""
        ids = encoder.encode(
            question.prompt,
            apply_chat_template=self._set.apply_chat_template,
            kwargs=template_kwargs(self._set.apply_chat_template_kwargs, question),
            max_response_len=self._set.max_response_len,
        )
        tag = opening_tag(self._set.thinking_end)
        return EncodedPrompt(pack(ids), tag is not None and encoder.ends_with(ids, tag))

    def width(self, encoded: EncodedPrompt, samples: list[int]) -> int:  # noqa: ARG002 - the contract
        """One sequence for each sample."""
        return len(samples)

    async def ask(
        self, asker: Asker, question: Question, encoded: EncodedPrompt, samples: list[int]
    ) -> list[Answer]:
        """One response for each sample, with its own seed."""
        prompt = unpack(encoded.ids)
        generations = await asker.generate(
            [prompt] * len(samples), sampling_for(self._set, question.id, samples)
        )
        return [Answer.of(generation, in_thought=encoded.in_thought) for generation in generations]
