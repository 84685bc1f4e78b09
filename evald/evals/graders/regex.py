"""Grader ``regex``: the last match of the user's pattern is the answer."""

from __future__ import annotations

import re

from evald.evals.graders.contract import Grade, GraderFailed, Rules, Sample, no_answer
from evald.evals.graders.exact import compare
from evald.evals.graders.references import NoSettings, TextGrader


class Regex(TextGrader[NoSettings]):
    """The last match of ``regex`` decides: its first group that took part, or all of it.

    It is compared as ``exact`` compares. Without a match there is no answer.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, NoSettings)

    def check(self) -> list[str]:
        """One sentence for each fault, of the pattern too."""
        return super().check() + pattern_faults(self.rules.regex, self.rules.grader)

    def grade(self, sample: Sample) -> Grade:
        """Search; a pattern may take for ever."""
        if self.rules.regex is None:
            raise GraderFailed(
                f"cannot grade: grader {self.rules.grader!r} has no pattern; set regex"
            )
        found = last_match(self.rules.regex, sample.response)
        if found is None:
            return no_answer("the pattern matches nothing in the response")
        return compare(found, sample)


def pattern_faults(pattern: str | None, grader: str) -> list[str]:
    """Say what is wrong with a pattern."""
    if pattern is None:
        return [f"regex: grader {grader!r} needs a pattern; give one"]
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return [f"regex: {pattern!r} is no regular expression: {error}"]
    return []


def last_match(pattern: str, text: str) -> str | None:
    """Return the last match: its first group that took part, or all of it."""
    last = None
    for last in re.finditer(pattern, text):  # noqa: B007 - only the last match counts
        pass
    if last is None:
        return None
    return next((group for group in last.groups() if group is not None), last.group())
