"""Which class grades the responses of an eval set, and what all of them have in front."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import msgspec

from evald.config import EvalSet
from evald.evals.graders.boxed import last_boxed
from evald.evals.graders.choice import Choice
from evald.evals.graders.command import Command
from evald.evals.graders.contract import (
    BOXED,
    Grade,
    Grader,
    GraderFailed,
    Rules,
    Sample,
    no_answer,
    whole_version,
)
from evald.evals.graders.exact import Contains, Exact
from evald.evals.graders.f1 import F1
from evald.evals.graders.mathematics import Mathematics
from evald.evals.graders.number import Number
from evald.evals.graders.python import Python
from evald.evals.graders.references import reference_texts
from evald.evals.graders.regex import Regex
from evald.evals.graders.remote import Remote
from evald.evals.graders.thinking import after_thinking

_GRADERS: dict[str, Callable[[Rules], Grader]] = {
    "exact": Exact,
    "contains": Contains,
    "regex": Regex,
    "number": Number,
    "choice": Choice,
    "f1": F1,
    "math": Mathematics,
    "remote": Remote,
    "command": Command,
    "python": Python,
}
GRADERS = tuple(_GRADERS)
_EXTERNAL = frozenset({"remote", "command", "python"})


def grader_of(rules: Rules) -> Grader:
    """Return the grader (the one inside ``boxed_``); raises GraderFailed for an unknown name."""
    if rules.inner not in _GRADERS:
        raise GraderFailed(f"cannot grade: grader {rules.grader!r} is unknown")
    return _GRADERS[rules.inner](rules)


def is_external(rules: Rules) -> bool:
    """Whether the user's own code grades, which is given all that is known of a sample."""
    return rules.inner in _EXTERNAL


def sample_texts(sample: Sample) -> Sample:
    """Return what built-in graders need of a sample; raises GraderFailed."""
    return Sample(
        response=sample.response,
        label=reference_texts(sample.label),
        in_thought=sample.in_thought,
    )


def check_grader(eval_set: EvalSet) -> list[str]:
    """One sentence for each fault of the grader's settings, the key in front."""
    rules = Rules.of(eval_set)
    if rules.inner not in _GRADERS:
        names = [*GRADERS, *(BOXED + name for name in GRADERS)]
        near = difflib.get_close_matches(eval_set.grader, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = f"one of {', '.join(GRADERS)}, or {BOXED} and one of them"
        return [f"grader: {eval_set.grader!r} is unknown; give {allowed}{hint}"]
    return grader_of(rules).check()


def label_problem(eval_set: EvalSet, label: Any) -> str | None:
    """Say what is wrong with a reference, or None."""
    return grader_of(Rules.of(eval_set)).label_fault(label)


def grader_version(eval_set: EvalSet) -> str:
    """Text that changes when the same response could get another score. May read files."""
    return whole_version(grader_of(Rules.of(eval_set)))


def grade(rules: Rules, sample: Sample) -> Grade:
    """Grade one response; raises GraderFailed.

    ``math``, ``regex`` and the user's own graders may take for ever, and some load or change much:
    they belong into a worker process.
    """
    answer = answer_of(rules, sample)
    return answer if isinstance(answer, Grade) else grader_of(rules).grade(answer)


def answer_of(rules: Rules, sample: Sample) -> Sample | Grade:
    """Return the sample with its answer alone as the response; a grade where there is none.

    What the model thought goes first, then what is around the last box. Linear in the response.
    """
    answer = after_thinking(rules, sample)
    if isinstance(answer, Grade):
        return answer
    if rules.boxed:
        content = last_boxed(answer)
        if content is None:
            return no_answer("no \\boxed{...} in the response")
        answer = content
    return msgspec.structs.replace(sample, response=answer)
