"""What miles and slime call ``rm_type``, as graders of evald.

The rules are of the same kind, not the same to the last character; where they differ is said
beside each. All of them give 0 or 1 here (``f1``: between), also where theirs gives -1 (``dapo``).
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from evald.evals.graders.contract import BOXED


class RmType(msgspec.Struct, frozen=True):
    """A grader, and the other fields of the eval set that make it the same rule."""

    grader: str
    fields: dict[str, Any] = {}


#: name -> what it is here, or (text) why there is no such thing.
RM_TYPES: dict[str, RmType | str] = {
    # Theirs takes the last box too, and compares normalised texts, then sympy's difference; ours
    # compares with math-verify, which sees more forms as equal (sets, intervals, units).
    "math": RmType("boxed_math"),
    # Theirs looks at the last 300 characters for "Answer: ..." and compares normalised texts with
    # an integer; ours looks at all of it, and 1/2 equals 0.5. Theirs also gives "acc" and "pred".
    "dapo": RmType("math", {"grader_config": {"answer_pattern": r"(?i)answer\s*:\s*([^\n]+)"}}),
    # Theirs takes what stands behind the last </think> (or the first ###Response, which is not
    # known here), gives 0 where there is none, and then grades as "math".
    "deepscaler": RmType("boxed_math", {"thinking": True}),
    # Theirs takes what stands behind the last <channel|>, if there is one, then grades as "math".
    "gemma_math": RmType("boxed_math", {"thinking": "auto", "thinking_end": "<channel|>"}),
    # Theirs takes the letters from the row's metadata, where they are fewer than ten, and falls
    # back to any capital letter that stands alone and to the option's text; ours never guesses.
    "gpqa": RmType("choice", {"choices": "ABCDEFGHIJ"}),
    # HotpotQA's rule in both.
    "f1": RmType("f1", {"grader_config": {"yes_no": True}}),
    # The same request and answer; the URL (rm_url) belongs into grader_config.url, and what
    # eval_reward_key picks into grader_config.reward_key.
    "remote_rm": RmType("remote"),
    "ifbench": (
        "its checks are IFBench's own code, which is not part of evald; write a function that "
        "calls it and set grader = 'python'"
    ),
    "random": "its score has nothing to do with the response; it is for trying out a trainer",
    "deterministic_random": (
        "its score has nothing to do with the response; it is for trying out a trainer"
    ),
}


def grader_for(rm_type: str) -> RmType | str:
    """Return the grader for an ``rm_type`` (also ``boxed_<rm_type>``), or a sentence why not.

    The sentence says what is wrong and what to do; it names neither file nor key.
    """
    inner = rm_type.removeprefix(BOXED)
    found = RM_TYPES.get(inner)
    if found is None:
        names = ", ".join(RM_TYPES)
        near = difflib.get_close_matches(inner, RM_TYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = f"known are {names}, and {BOXED} and one of them"
        return f"rm_type {rm_type!r} is unknown; {allowed}{hint}"
    if isinstance(found, str):
        return f"rm_type {rm_type!r} cannot be served: {found}"
    if inner == rm_type or found.grader.startswith(BOXED):
        return found
    return RmType(BOXED + found.grader, found.fields)
