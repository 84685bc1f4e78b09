"""What a user's own grader may answer: a number, true or false, or an object with a score."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from evald.evals.graders.contract import Grade, GraderFailed, answered, no_answer
from evald.text import one_line

#: how much of an answer that is none is shown, characters.
_SHOWN_CHARS = 120
SCORE = "score"
#: how much of a text is kept with the sample, characters.
_TEXT_CHARS = 4000


def verdict(result: Any, *, score_key: str = SCORE) -> Grade:
    """Make a grade of what a grader answered; raises GraderFailed.

    Of an object, ``score_key`` is the score (a number, true, or false); ``answer`` (text: equal
    ones vote together), ``reason`` (text, for people) and ``no_answer`` (true: the response has
    none) may be there. Everything else in it is the grader's own.
    """
    if isinstance(result, Grade):
        result = {**msgspec.structs.asdict(result), score_key: result.score}
    if not isinstance(result, dict):
        return answered("", _score(result), shown="-")
    reason = _text(result, "reason")
    if result.get("no_answer") is True:
        return no_answer(reason or "the grader found no answer")
    if score_key not in result:
        has = ", ".join(map(str, result)) or "nothing"
        raise GraderFailed(f"the grader's answer has no {score_key!r} (it has {one_line(has)})")
    grade = answered(_text(result, "answer"), _score(result[score_key]))
    return msgspec.structs.replace(grade, reason=reason or grade.reason)


def _score(value: Any) -> float:
    # numbers of array libraries are no numbers of Python's, but have one
    value = getattr(value, "item", lambda: value)()
    if not isinstance(value, int | float):
        shown = one_line(repr(value)[:_SHOWN_CHARS])
        raise GraderFailed(f"the grader's score must be a number, true or false, but is {shown}")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise GraderFailed(f"the grader's score must be finite, but is {score}")
    return score


def _text(result: dict[str, Any], key: str) -> str:
    value = result.get(key)
    text = "" if value is None else value if isinstance(value, str) else repr(value)
    return text[:_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()
