"""What all graders have in common: what they are given, what they say, and how they fail."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
import xxhash

from evald.config import EvalSet
from evald.errors import EvaldError
from evald.evals.rows import Prompt

#: prefix of a grader's name: the content of the last box goes to the grader behind it.
BOXED = "boxed_"
#: goes up when thinking or boxes are taken off differently.
_ANSWER_VERSION = 2
#: an answer that is longer votes with its beginning and a hash: millions of them stay in memory.
_VOTE_CHARS = 120


class GraderFailed(EvaldError):
    """The grader could not do its work; the sample counts as ``grader_error``."""


class Rules(msgspec.Struct, frozen=True):
    """How the responses of an eval set are graded; travels to the worker processes."""

    grader: str
    regex: str | None = None
    choices: str = "ABCD"
    #: settings of the grader, as the config has them.
    config: dict[str, Any] = {}
    thinking: Literal["auto"] | bool = "auto"
    thinking_end: str = "</think>"
    #: version of the grader when its set was loaded: files of the user's may change; "": unknown.
    version: str = ""

    @classmethod
    def of(cls, eval_set: EvalSet, *, version: str = "") -> Rules:
        """Take the rules out of an eval set's config."""
        return cls(
            eval_set.grader,
            eval_set.regex,
            eval_set.choices,
            eval_set.grader_config,
            eval_set.thinking,
            eval_set.thinking_end,
            version,
        )

    @property
    def boxed(self) -> bool:
        r"""Only what is in the last ``\boxed{...}`` counts."""
        return self.grader.startswith(BOXED)

    @property
    def inner(self) -> str:
        """Name of the grader inside ``boxed_``."""
        return self.grader.removeprefix(BOXED)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One response to grade, and what is known of its question."""

    response: str
    #: the reference as the row has it.
    label: Any
    prompt: Prompt = ""
    #: what the row has at ``metadata_key``.
    metadata: Any = None
    #: the question's id.
    question: str = ""
    #: the prompt ended inside an open thought, so that the response begins in it.
    in_thought: bool = False


class Grade(msgspec.Struct, frozen=True):
    """What a grader says about one response."""

    #: normally 0 to 1; built-in graders other than ``f1`` give 0 or 1.
    score: float
    no_answer: bool = False
    #: the answer as it was compared; equal answers vote together.
    answer: str = ""
    #: there is no answer, as the response does not end its thinking.
    unfinished_thinking: bool = False
    #: what was taken for the answer, or why there is none; for people.
    reason: str = ""


class Grader(Protocol):
    """One way of grading, with the settings of one eval set. Made for each use, without state."""

    def check(self) -> list[str]:
        """One sentence for each fault of the settings, the key in front."""
        ...

    def label_fault(self, label: Any) -> str | None:
        """Say what is wrong with a reference, or None."""
        ...

    def version(self) -> str:
        """Text that changes when the same response could get another score. May read files."""
        ...

    def grade(self, sample: Sample) -> Grade:
        """Grade; ``response`` is already without thinking and box. Raises GraderFailed."""
        ...


def whole_version(grader: Grader) -> str:
    """Version of a grader, and of what all of them have in front."""
    return f"{_ANSWER_VERSION}/{grader.version()}"


def answered(answer: str, score: float, *, shown: str = "") -> Grade:
    """Grade an answer that is there; ``shown``: what of it people see, if not all."""
    vote = answer
    if len(answer) > _VOTE_CHARS:
        digest = xxhash.xxh3_64_hexdigest(answer.encode("utf-8", "backslashreplace"))
        vote = f"{answer[:_VOTE_CHARS]}... {digest}"
    return Grade(float(score), answer=vote, reason=f"answer: {(shown or answer)[:200]}")


def no_answer(reason: str) -> Grade:
    """Grade a response in which there is none."""
    return Grade(0.0, no_answer=True, reason=reason)
