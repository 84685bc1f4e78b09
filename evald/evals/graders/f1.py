"""Grader ``f1``: how many words answer and reference have in common."""

from __future__ import annotations

import re
import string
from collections import Counter

from evald.config import Table
from evald.evals.graders.contract import Grade, Rules, Sample, answered, no_answer
from evald.evals.graders.references import TextGrader, reference_texts

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: answers that are right or wrong as a whole in HotpotQA.
_WHOLE = frozenset({"yes", "no", "noanswer"})


class F1Settings(Table, frozen=True, kw_only=True):
    """Which of the two common rules."""

    #: HotpotQA's addition: an answer or reference "yes", "no" or "noanswer" must be all there is.
    yes_no: bool = False


class F1(TextGrader[F1Settings]):
    """Harmonic mean of precision and recall over words; the best reference counts.

    Both sides are lower-cased, lose ASCII punctuation and the words a, an, the, and are split at
    white space. Words count as often as they occur. If nothing is left of one side, the score is 1
    where nothing is left of the other either, else 0.

    The rule and its normalisation are those of SQuAD (Rajpurkar et al., arXiv 1606.05250, and its
    evaluation script v2.0); ``yes_no`` adds that of HotpotQA (Yang et al., arXiv 1809.09600).
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, F1Settings)

    def grade(self, sample: Sample) -> Grade:
        """Count words."""
        if not sample.response.strip():
            return no_answer("the answer is empty")
        found = words(sample.response)
        scores = [self._score(found, words(text)) for text in reference_texts(sample.label)]
        return answered(" ".join(found), max(scores), shown=sample.response.strip())

    def _score(self, found: list[str], wanted: list[str]) -> float:
        whole = not _WHOLE.isdisjoint({" ".join(found), " ".join(wanted)})
        if self.settings.yes_no and whole and found != wanted:
            return 0.0
        return f1(found, wanted)


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(found: list[str], wanted: list[str]) -> float:
    """``2 * common / (len(found) + len(wanted))``: that mean, with the fractions resolved."""
    if not found or not wanted:
        return float(found == wanted)
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted))
