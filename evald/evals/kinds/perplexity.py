"""Kind ``perplexity``: how well the model predicts texts that it did not write."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from evald.config import EvalSet
from evald.evals.graders import Grade
from evald.evals.kinds.contract import Answer, Asker
from evald.evals.kinds.scoring import SCORE_ONLY
from evald.evals.prompts import PromptEncoder
from evald.evals.rows import BadRow, Question, json_kind, prompt_fault, take, template_kwargs
from evald.evals.token_ids import pack, unpack


class Windows(msgspec.Struct, frozen=True, tag=True):
    """A text as packed token ids, cut into windows; every scored token is scored in exactly one."""

    texts: list[bytes]
    #: index of each window's first scored token; what stands before it is context.
    starts: list[int]
    #: length of the scored text in bytes of UTF-8.
    n_bytes: int


class Perplexity:
    """Scores whole documents (``perplexity_of = "document"``), or a response behind its prompt.

    Document: the first token is predicted from the beginning-of-text token (where the tokenizer
    has none: end-of-text), as the lm-evaluation-harness does. A text longer than
    ``window_tokens`` is cut; each later window sees the last ``window_overlap_tokens`` tokens
    before it. ``"response"``: what is scored is the label's text behind the prompt, which is what
    supervised fine-tuning trains; it is not cut.

    A sample's score is its negative log-likelihood for each token, in nats; ``values`` keeps the
    sums ``nll`` (nats), ``tokens`` and ``bytes``, from which the set's numbers are made.
    """

    single = True
    apart = False

    def __init__(self, eval_set: EvalSet) -> None:
        self._set = eval_set

    def check(self) -> list[str]:
        """One sentence for each fault of the windows' settings."""
        window, overlap = self._set.window_tokens, self._set.window_overlap_tokens
        if overlap >= window:
            return [
                f"window_overlap_tokens: {overlap} is not below window_tokens = {window}; lower it"
            ]
        return []

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take the document, or prompt and response; raises BadRow."""
        key = self._set.input_key
        prompt = take(row, key, "input_key")
        if fault := prompt_fault(prompt):
            raise BadRow(f"key {key!r}: {fault}")
        if self._set.perplexity_of == "document":
            if not isinstance(prompt, str):
                raise BadRow(f'key {key!r} is a chat; give text, or set perplexity_of = "response"')
            return {"prompt": prompt}
        label = take(row, self._set.label_key, "label_key")
        if not isinstance(label, str) or not label:
            raise BadRow(
                f"key {self._set.label_key!r} is {json_kind(label)}; give the response's text"
            )
        return {"prompt": prompt, "label": label}

    def encode(self, encoder: PromptEncoder, question: Question) -> Windows:
        """Token ids of all windows; raises PromptError."""
        if self._set.perplexity_of == "response":
            ids, start = encoder.encode_continued(
                question.prompt,
                question.label,
                apply_chat_template=self._set.apply_chat_template,
                kwargs=template_kwargs(self._set.apply_chat_template_kwargs, question),
            )
            return Windows([pack(ids)], [start], len(question.label.encode()))
        text = str(question.prompt)
        ids = encoder.encode_document(text)
        size = min(self._set.window_tokens, encoder.longest_scored)
        overlap = min(self._set.window_overlap_tokens, size - 1)
        cuts = cut_windows(len(ids), size, overlap)
        return Windows(
            [pack(ids[first:end]) for first, _, end in cuts],
            [start - first for first, start, _ in cuts],
            len(text.encode()),
        )

    def width(self, encoded: Windows, samples: list[int]) -> int:  # noqa: ARG002 - the contract
        """One sequence for each window."""
        return len(encoded.texts)

    async def ask(
        self,
        asker: Asker,
        question: Question,  # noqa: ARG002 - the contract
        encoded: Windows,
        samples: list[int],
    ) -> list[Answer]:
        """Score all windows of one document in one list request."""
        scored = await asker.generate(
            [unpack(ids) for ids in encoded.texts],
            [SCORE_ONLY] * len(encoded.texts),
            score_from=encoded.starts,
        )
        nll = -math.fsum(value for one in scored for value in one.prompt_logprobs)
        n_tokens = sum(len(one.prompt_logprobs) for one in scored)
        values = {"nll": nll, "tokens": float(n_tokens), "bytes": float(encoded.n_bytes)}
        grade = Grade(nll / n_tokens, reason=f"{n_tokens} tokens, {nll:.3f} nats")
        return [Answer.of(scored[0], grade=grade, values=values) for _ in samples]


def cut_windows(n_tokens: int, size: int, overlap: int) -> list[tuple[int, int, int]]:
    """Cut ``n_tokens`` (the first is context only) into windows ``(first, start, end)``.

    A window holds ``[first, end)``, at most ``size`` tokens, and scores ``[start, end)``. Later
    windows see the last ``overlap`` (at least 1) tokens before ``start``.
    """
    cuts = []
    start = 1
    while start < n_tokens:
        first = max(0, start - max(overlap, 1))
        end = min(n_tokens, first + size)
        cuts.append((first, start, end))
        start = end
    return cuts
