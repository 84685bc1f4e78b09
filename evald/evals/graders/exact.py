"""Graders ``exact`` and ``contains``: the answer is, or has in it, a reference."""

from __future__ import annotations

from evald.config import Table
from evald.evals.graders.contract import Grade, Rules, Sample, answered, no_answer
from evald.evals.graders.references import TextGrader, normalise, reference_texts


class TextSettings(Table, frozen=True, kw_only=True):
    """How texts are compared."""

    #: upper and lower case are the same.
    ignore_case: bool = False


class Exact(TextGrader[TextSettings]):
    """The whole answer equals a reference.

    White space at the ends does not count, and each run of it is one space. Everything else does:
    case (unless ``ignore_case``), digits (042 is not 42), full stops.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, TextSettings)

    def grade(self, sample: Sample) -> Grade:
        """Compare."""
        return compare(sample.response, sample, ignore_case=self.settings.ignore_case)


class Contains(TextGrader[TextSettings]):
    """A reference stands somewhere in the answer, also inside a word.

    White space and case as in ``exact``. Every answer that is not empty is one.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, TextSettings)

    def grade(self, sample: Sample) -> Grade:
        """Search."""
        found = _folded(sample.response, ignore_case=self.settings.ignore_case)
        if not found:
            return no_answer("the answer is empty")
        wanted = (
            _folded(text, ignore_case=self.settings.ignore_case)
            for text in reference_texts(sample.label)
        )
        return answered(found, any(text in found for text in wanted if text))


def compare(answer: str, sample: Sample, *, ignore_case: bool = False) -> Grade:
    """Compare an answer with the references of a sample, white space aside."""
    found = _folded(answer, ignore_case=ignore_case)
    if not found:
        return no_answer("the answer is empty")
    wanted = {_folded(text, ignore_case=ignore_case) for text in reference_texts(sample.label)}
    return answered(found, found in wanted)


def _folded(text: str, *, ignore_case: bool) -> str:
    return normalise(text.casefold() if ignore_case else text)
