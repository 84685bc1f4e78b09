"""Where a model thinks before it answers, only what stands behind the thinking is graded.

With ``thinking = true`` every response must end its thinking with ``thinking_end``. With "auto" a
response has to if it thinks at all: if its prompt ends inside an open thought (the opening tag and
white space: what chat templates of thinking models write), or if either tag stands in it. The
opening tag is ``thinking_end`` without its slash; where that has none, only the closing tag is
looked for. With ``thinking = false`` the whole response is the answer.

The *first* closing tag ends the thinking: one that is quoted later belongs to the answer. Without
one there is no answer at all, which is counted apart (``unfinished_thinking``): what stands in a
thought that was cut is no answer, even where it happens to be right.
"""

from __future__ import annotations

from evald.evals.graders.contract import Grade, Rules, Sample


def opening_tag(thinking_end: str) -> str | None:
    """Return the tag that opens what ``thinking_end`` closes; None where it cannot be known."""
    opening = thinking_end.replace("/", "", 1)
    return None if opening == thinking_end else opening


def after_thinking(rules: Rules, sample: Sample) -> str | Grade:
    """Return the answer, or the grade of a response that never came to one. Linear."""
    response, closing = sample.response, rules.thinking_end
    if rules.thinking is False:
        return response
    _, closed, answer = response.partition(closing)
    if closed:
        return answer
    opening = opening_tag(closing)
    opened = sample.in_thought or (opening is not None and opening in response)
    if rules.thinking is True or opened:
        return Grade(
            0.0,
            no_answer=True,
            unfinished_thinking=True,
            reason=f"the response does not end its thinking: no {closing} in it",
        )
    return response
