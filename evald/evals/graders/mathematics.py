"""Grader ``math``: mathematical equality, decided by math-verify."""

from __future__ import annotations

import re
from typing import Any

from evald.config import Table
from evald.evals.graders.contract import (
    Grade,
    GraderFailed,
    Rules,
    Sample,
    answered,
    no_answer,
)
from evald.evals.graders.references import TextGrader, normalise, reference_texts
from evald.evals.graders.regex import last_match
from evald.evals.graders.settings import setting_version

#: integers up to here are exact as floating point numbers.
_VOTE_BITS = 53


class MathSettings(Table, frozen=True, kw_only=True):
    """Where the expression stands."""

    #: pattern whose last match (its first group, or all of it) is read instead of the whole answer.
    answer_pattern: str | None = None


class Mathematics(TextGrader[MathSettings]):
    r"""Whether an expression of the answer equals a reference as math-verify sees it.

    From an answer, math-verify's own extraction takes the expressions (a box before other LaTeX
    before plain numbers, the last ones first); ``boxed_math`` shows it the last box alone. A
    reference is read as LaTeX between dollar signs, or as it is where that makes no sense. Source:
    huggingface/Math-Verify, called with its defaults, but for its time limits: they use SIGALRM
    and a BaseException, and are off. Whoever calls this ends the process instead.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, MathSettings)

    def check(self) -> list[str]:
        """One sentence for each fault, of the pattern too."""
        if problems := super().check():
            return problems
        pattern = self.settings.answer_pattern
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            return [f"grader_config.answer_pattern: {pattern!r} is no regular expression: {error}"]
        return []

    def version(self) -> str:
        """Name math-verify's version, too."""
        from importlib.metadata import version  # noqa: PLC0415 - only here

        settings = setting_version(self.rules.config)
        return f"{self.VERSION}/math-verify-{version('math-verify')}{settings}"

    def grade(self, sample: Sample) -> Grade:
        """Parse and compare; may take for ever, and loads sympy."""
        answer = sample.response
        if self.settings.answer_pattern is not None:
            match = last_match(self.settings.answer_pattern, answer)
            if match is None:
                return no_answer("answer_pattern matches nothing in the response")
            # LaTeX is only seen between dollar signs
            answer = f"${match}$" if "\\" in match and "$" not in match else match
        elif self.rules.boxed:
            answer = f"\\boxed{{{answer}}}"
        return _grade(answer, reference_texts(sample.label))


def _grade(answer: str, references: list[str]) -> Grade:
    from math_verify import parse, verify  # noqa: PLC0415 - sympy: worker processes only

    found = parse(answer, parsing_timeout=None)
    if not found:
        return no_answer("no mathematical expression in the response")
    # str() of an expression may be endless; the text that it was parsed from is beside it
    text = next((text for text in found if isinstance(text, str)), "?")
    vote = _written(found) or normalise(text)
    for reference in references:
        gold = parse(f"${reference}$", parsing_timeout=None) or parse(
            reference, parsing_timeout=None
        )
        if not gold:
            raise GraderFailed(f"cannot parse the reference {reference[:80]!r} as mathematics")
        if verify(gold, found, timeout_seconds=None):
            return answered(vote, 1.0, shown=text)
        # "no" may also mean that a comparison broke down: ask again, and let it say so
        verify(gold, found, timeout_seconds=None, raise_on_error=True)
    return answered(vote, 0.0, shown=text)


def _written(found: list[Any]) -> str | None:
    """One text for equal rational numbers, so that 1/2 and 0.5 vote together; None for others."""
    number = found[0]
    if not (getattr(number, "is_Float", False) or getattr(number, "is_Rational", False)):
        return None
    # sympy's own text of a number with a million digits takes minutes
    if number.is_Rational and max(abs(number.p), number.q).bit_length() > _VOTE_BITS:
        return None
    value = float(number)
    return f"{int(value)}" if value.is_integer() else repr(value)
