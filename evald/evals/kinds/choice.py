"""Kind ``loglikelihood_choice``: which of the options the model finds most likely.

Nothing is generated: each option is put behind the prompt and scored by the sum of its tokens'
log-probabilities, as the lm-evaluation-harness does for multiple choice (MMLU, HellaSwag, ...).
"""

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

_MIN_OPTIONS = 2


class Options(msgspec.Struct, frozen=True, tag=True):
    """A question's options as packed token ids, each with the prompt in front."""

    texts: list[bytes]
    #: index of each option's first token.
    starts: list[int]


class LoglikelihoodChoice:
    """Scores every option of a question in one list request.

    The score is 1 when the label's option has the highest sum of log-probabilities
    (``choose_by = "sum"``), or the highest sum for each character of the option
    (``"per_character"``: the harness' ``acc_norm``). Both are kept, as ``acc`` and ``acc_norm``,
    with ``gold_share``: the label's share when the options' probabilities are made to sum to 1.
    """

    single = True
    apart = False

    def __init__(self, eval_set: EvalSet) -> None:
        self._set = eval_set

    def check(self) -> list[str]:
        """One sentence for each fault of the options' settings."""
        letters = self._set.choices
        if self._set.options_key is None and len(set(letters)) != len(letters):
            return [f"choices: {letters!r} has a letter twice; name each once"]
        if self._set.options_key is None and len(letters) < _MIN_OPTIONS:
            return [f"choices: {letters!r} is one letter; name two at least, or set options_key"]
        return []

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take prompt, options and the label, which becomes the option's index; raises BadRow."""
        key = self._set.input_key
        prompt = take(row, key, "input_key")
        if fault := prompt_fault(prompt):
            raise BadRow(f"key {key!r}: {fault}")
        options = self._options(row)
        label = take(row, self._set.label_key, "label_key")
        return {"prompt": prompt, "options": options, "label": self._index(label, options)}

    def _options(self, row: dict[str, Any]) -> list[str]:
        key = self._set.options_key
        if key is None:
            return list(self._set.choices)
        options = take(row, key, "options_key")
        good = isinstance(options, list) and len(options) >= _MIN_OPTIONS
        if not good or not all(isinstance(option, str) and option for option in options):
            raise BadRow(f"key {key!r} must be a list of two or more texts that are not empty")
        if len(set(options)) != len(options):
            raise BadRow(f"key {key!r} has the same option twice")
        return list(options)

    def _index(self, label: Any, options: list[str]) -> int:
        """Find the option that a label means: its index, its letter, or its text."""
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise BadRow(
                f"key {self._set.label_key!r} is {json_kind(label)}; give the right option's index "
                "(from 0), letter or text"
            )
        if isinstance(label, str):
            if label in options:
                return options.index(label)
            letters = self._set.choices[: len(options)]
            if len(label) == 1 and label in letters:
                return letters.index(label)
        elif 0 <= label < len(options):
            return label
        raise BadRow(
            f"key {self._set.label_key!r}: {label!r} is none of the {len(options)} options; give "
            "the right one's index (from 0), letter or text"
        )

    def encode(self, encoder: PromptEncoder, question: Question) -> Options:
        """Token ids of every option behind the prompt; raises PromptError."""
        prefix = self._set.option_prefix
        if prefix is None:
            prefix = " " if isinstance(question.prompt, str) else ""
        pairs = [
            encoder.encode_continued(
                question.prompt,
                prefix + option,
                apply_chat_template=self._set.apply_chat_template,
                kwargs=template_kwargs(self._set.apply_chat_template_kwargs, question),
            )
            for option in question.options
        ]
        return Options([pack(ids) for ids, _ in pairs], [start for _, start in pairs])

    def width(self, encoded: Options, samples: list[int]) -> int:  # noqa: ARG002 - the contract
        """One sequence for each option."""
        return len(encoded.texts)

    async def ask(
        self, asker: Asker, question: Question, encoded: Options, samples: list[int]
    ) -> list[Answer]:
        """Score all options; the same answer for every sample (there is one)."""
        scored = await asker.generate(
            [unpack(ids) for ids in encoded.texts],
            [SCORE_ONLY] * len(encoded.texts),
            score_from=encoded.starts,
        )
        sums = [math.fsum(one.prompt_logprobs) for one in scored]
        rates = [total / len(option) for total, option in zip(sums, question.options, strict=True)]
        gold = int(question.label)
        by_sum, by_rate = _argmax(sums), _argmax(rates)
        chosen = by_sum if self._set.choose_by == "sum" else by_rate
        highest = max(sums)
        weights = [math.exp(total - highest) for total in sums]
        values = {
            "acc": float(by_sum == gold),
            "acc_norm": float(by_rate == gold),
            "gold_share": weights[gold] / math.fsum(weights),
        }
        grade = Grade(
            float(chosen == gold), answer=question.options[chosen], reason=_reason(question, sums)
        )
        return [Answer.of(scored[chosen], grade=grade, values=values) for _ in samples]


def _argmax(values: list[float]) -> int:
    """Index of the highest value, the first one of equals."""
    return max(range(len(values)), key=lambda index: values[index])


def _reason(question: Question, sums: list[float]) -> str:
    shown = (
        f"{option[:20]!r}: {total:.3f}"
        for option, total in zip(question.options, sums, strict=True)
    )
    return "log-probabilities: " + ", ".join(shown)
