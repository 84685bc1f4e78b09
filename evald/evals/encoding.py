"""The questions of a set as token ids, or why one cannot be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from evald.config import EvalSet
from evald.evals.chat_template import PromptError, PromptTooLong
from evald.evals.kinds import kind_of
from evald.evals.kinds.choice import Options
from evald.evals.kinds.custom import Unsent
from evald.evals.kinds.generate import EncodedPrompt
from evald.evals.kinds.perplexity import Windows
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles, tokenizer_digest
from evald.evals.rows import Question
from evald.text import one_line


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Why a question cannot be asked."""

    sentence: str
    #: its prompt and response do not fit into the context.
    too_long: bool = False


#: what the kinds make of a question.
Encoded = EncodedPrompt | Options | Windows | Unsent | Fault


class SetEncoder(Protocol):
    """Whoever encodes: in this process (``Encoding``), or in one of its own. Blocking."""

    def digest(self, tokenizer: bytes) -> str:
        """Digest of what a tokenizer.json means; raises PromptError."""
        ...

    def load(self, files: TokenizerFiles, limits: ModelLimits) -> None:
        """Build the tokenizer for what is encoded from now on; raises PromptError."""
        ...

    def encode(self, eval_set: EvalSet, questions: Sequence[Question]) -> list[Encoded]:
        """Encode questions of a set, in order; raises PromptError for a fault of the set."""
        ...

    def close(self) -> None:
        """Give up everything, what is under way too."""
        ...


class Encoding:
    """Encodes in this process, which may keep much of what a tokenizer takes."""

    def __init__(self) -> None:
        self._encoder: PromptEncoder | None = None

    def digest(self, tokenizer: bytes) -> str:
        """Digest of what a tokenizer.json means; raises PromptError."""
        return tokenizer_digest(tokenizer)

    def load(self, files: TokenizerFiles, limits: ModelLimits) -> None:
        """Build the tokenizer; raises PromptError."""
        self._encoder = PromptEncoder(files, limits)

    def encode(self, eval_set: EvalSet, questions: Sequence[Question]) -> list[Encoded]:
        """Encode questions; raises PromptError for stop tokens that the model does not have."""
        encoder = self._encoder
        if encoder is None:
            raise ValueError("no tokenizer is loaded")
        try:
            encoder.check_ids(eval_set.stop_token_ids)
        except PromptError as error:
            raise PromptError(f"stop_token_ids: {error}") from error
        kind = kind_of(eval_set)
        encoded: list[Encoded] = []
        for question in questions:
            try:
                encoded.append(kind.encode(encoder, question))
            except PromptError as error:
                encoded.append(Fault(one_line(str(error)), isinstance(error, PromptTooLong)))
        return encoded

    def close(self) -> None:
        """Give up the tokenizer."""
        self._encoder = None
