r"""Graders: pure functions from (response, reference) to a grade.

``exact``, ``regex``, ``choice`` and ``math``, and ``boxed_<grader>``, which hands the content of
the last ``\boxed{...}`` to the grader inside. A reference may be text, a number, true/false, or a
list of them: then any of them will do.

A response without an answer is a wrong answer (``no_answer``); a grader that cannot do its work
raises GraderFailed, and that is not a wrong answer.
"""

from __future__ import annotations

import difflib
import re
from importlib import metadata
from typing import Any

import msgspec

from evald.config import EvalSet
from evald.errors import EvaldError

GRADERS = ("exact", "regex", "choice", "math")
BOXED = "boxed_"

#: goes up when a grader would score an answer differently: journals of older scores are then void.
_VERSION = 1

_BOX_TOKENS = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
#: what may stand before and behind a letter: brackets, markdown, dollar signs. All counts are
#: bounded, so that no response makes matching slow.
_OPEN, _CLOSE = r"[\s(\[{*_$\"'`]{0,6}", r"[)\]}*_$\"'`]{0,4}"


class GraderFailed(EvaldError):
    """The grader could not do its work; the sample counts as ``grader_error``."""


class Rules(msgspec.Struct, frozen=True):
    """How the responses of an eval set are graded; travels to the worker processes."""

    grader: str
    regex: str | None = None
    choices: str = "ABCD"

    @classmethod
    def of(cls, eval_set: EvalSet) -> Rules:
        """Take the rules out of an eval set's config."""
        return cls(eval_set.grader, eval_set.regex, eval_set.choices)

    @property
    def inner(self) -> str:
        """Name of the grader inside ``boxed_``."""
        return self.grader.removeprefix(BOXED)


class Grade(msgspec.Struct, frozen=True):
    """What a grader says about one response."""

    #: 0 or 1.
    score: float
    no_answer: bool = False
    #: the answer as it was compared; equal answers vote together.
    answer: str = ""
    #: there is no answer, as the response does not end its thinking.
    unfinished_thinking: bool = False
    #: what was taken for the answer, or why there is none; for people.
    reason: str = ""


def check_grader(eval_set: EvalSet) -> list[str]:
    """One sentence for each fault of the grader's settings, the key in front."""
    inner = eval_set.grader.removeprefix(BOXED)
    if inner not in GRADERS:
        names = [*GRADERS, *(BOXED + name for name in GRADERS)]
        near = difflib.get_close_matches(eval_set.grader, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return [f"grader: {eval_set.grader!r} is unknown; give one of {', '.join(names)}{hint}"]
    if inner == "choice" and len(set(eval_set.choices)) != len(eval_set.choices):
        return [f"choices: {eval_set.choices!r} has a letter twice; name each once"]
    if inner == "regex":
        if eval_set.regex is None:
            return [f"regex: grader {eval_set.grader!r} needs a pattern; give one"]
        try:
            re.compile(eval_set.regex)
        except re.error as error:
            return [f"regex: {eval_set.regex!r} is no regular expression: {error}"]
    return []


def label_problem(eval_set: EvalSet, label: Any) -> str | None:
    """Say what is wrong with a reference, or None."""
    try:
        references = reference_texts(label)
    except GraderFailed as failed:
        return str(failed)
    if eval_set.grader.removeprefix(BOXED) != "choice":
        return None
    wrong = [text for text in references if _as_choice(text, eval_set.choices) is None]
    if wrong:
        return f"the reference {wrong[0]!r} is none of the letters {eval_set.choices!r}"
    return None


def grader_version(grader: str) -> str:
    """Text that changes when the same response could get another score."""
    if grader.removeprefix(BOXED) == "math":
        return f"{_VERSION}/math-verify-{metadata.version('math-verify')}"
    return str(_VERSION)


def grade(rules: Rules, response: str, label: Any) -> Grade:
    """Grade one response.

    Raises GraderFailed. ``math`` may take for ever and loads sympy: it belongs into a worker
    process, and so does ``regex``, whose pattern may explode.
    """
    references = reference_texts(label)
    boxed = rules.grader.startswith(BOXED)
    answer = response
    if boxed:
        content = last_boxed(response)
        if content is None:
            return Grade(0.0, no_answer=True, reason="no \\boxed{...} in the response")
        answer = content
    if rules.inner == "exact":
        return _compare(answer, references)
    if rules.inner == "regex":
        return _regex(rules.regex, answer, references)
    if rules.inner == "choice":
        return _choice(rules.choices, answer, references)
    if rules.inner == "math":
        return _math(f"\\boxed{{{answer}}}" if boxed else answer, references)
    raise GraderFailed(f"cannot grade: grader {rules.grader!r} is unknown")


def last_boxed(response: str) -> str | None:
    r"""Content of the ``\boxed{...}`` that opens last among those whose braces balance.

    One pass with a stack: no response can make it slow. ``\{`` and ``\}`` do not count as braces.
    """
    stack: list[tuple[bool, int, int]] = []
    best: tuple[int, int, int] | None = None
    for token in _BOX_TOKENS.finditer(response):
        text = token.group()
        if text == "}":
            if stack:
                is_box, start, inside = stack.pop()
                if is_box and (best is None or start > best[0]):
                    best = (start, inside, token.start())
        elif not text.startswith(("\\{", "\\}")):
            stack.append((text != "{", token.start(), token.end()))
    return None if best is None else response[best[1] : best[2]]


def normalise(text: str) -> str:
    """Strip, and make each run of white space one space; nothing else: case and digits count."""
    return " ".join(text.split())


def reference_texts(label: Any) -> list[str]:
    """Every reference as text; numbers as JSON writes them."""
    labels = label if isinstance(label, list) else [label]
    texts = []
    for item in labels:
        if isinstance(item, bool):
            texts.append("true" if item else "false")
        elif isinstance(item, str | int | float):
            texts.append(str(item))
        else:
            raise GraderFailed(
                "the reference must be text, a number, true/false, or a list of them, "
                f"but is {msgspec.json.encode(label).decode()[:80]}"
            )
    if not any(normalise(text) for text in texts):
        raise GraderFailed("the reference is empty")
    return texts


def _compare(answer: str, references: list[str]) -> Grade:
    found = normalise(answer)
    if not found:
        return Grade(0.0, no_answer=True, reason="the answer is empty")
    hit = found in {normalise(reference) for reference in references}
    return Grade(float(hit), reason=f"answer: {found[:200]}")


def _regex(pattern: str | None, answer: str, references: list[str]) -> Grade:
    """Compare the last match: its first group that took part, or all of it."""
    if pattern is None:
        raise GraderFailed("cannot grade: grader 'regex' has no pattern; set regex")
    last = None
    for last in re.finditer(pattern, answer):  # noqa: B007 - only the last match counts
        pass
    if last is None:
        return Grade(0.0, no_answer=True, reason="the pattern matches nothing in the response")
    found = next((group for group in last.groups() if group is not None), last.group())
    return _compare(found, references)


def _choice(choices: str, answer: str, references: list[str]) -> Grade:
    found = choice_letter(answer, choices)
    if found is None:
        return Grade(0.0, no_answer=True, reason=f"none of the letters {choices} is chosen")
    hit = found in {_as_choice(reference, choices) for reference in references}
    return Grade(float(hit), reason=f"answer: {found}")


def _as_choice(text: str, choices: str) -> str | None:
    """Give the letter that ``text`` is and nothing more, in the config's own case."""
    text = text.strip()
    if len(text) != 1:
        return None
    if text in choices:
        return text
    folded = [letter for letter in choices if letter.casefold() == text.casefold()]
    return folded[0] if len(folded) == 1 else None


def choice_letter(response: str, choices: str) -> str | None:
    r"""Give the letter that a response chooses; the first rule that finds one decides.

    1. The whole response is the letter, perhaps in brackets or markdown, in any case: ``(b)``.
    2. The last ``answer is X``, ``answer: X``.
    3. The last ``\boxed{X}``.
    4. The response begins with ``X.``, ``X)`` or ``X:``.
    5. The last ``(X)`` or ``**X**``.
    6. The last line is the letter.

    Letters inside a sentence are never taken ("A dog ...").
    """
    text = re.sub(r"[ \t]+", " ", _TEXT_MACRO.sub(r"\1", response))
    if whole := _bare_letter(text, choices):
        return whole
    letter = f"([{re.escape(choices)}])"
    alone = rf"{letter}(?!\w)(?!\s[a-z])"
    said = re.findall(rf"(?i:answer)(?i: is)? ?:?{_OPEN}(?:\\boxed{_OPEN})?{alone}", text)
    if said:
        return str(said[-1])
    if boxed := last_boxed(text):
        return _bare_letter(boxed, choices)
    if begins := re.match(rf"[\s*_$\"'`]{{0,6}}{letter} ?[.):]", text):
        return begins.group(1)
    marked = re.findall(rf"\({letter}\)|\*\*{_OPEN}{letter}[.:]?{_CLOSE}\*\*", text)
    if marked:
        return "".join(marked[-1])
    lines = text.strip().splitlines()
    return _bare_letter(lines[-1], choices) if lines else None


def _bare_letter(text: str, choices: str) -> str | None:
    """Give the letter if there is nothing but brackets, markdown and a full stop around it."""
    return _as_choice(text.strip(" \t\r\n()[]{}*_$\"'`.:,"), choices)


def _math(answer: str, references: list[str]) -> Grade:
    """Compare with math-verify.

    Its own time limits are off: they use SIGALRM and a BaseException. Whoever calls this ends the
    process instead.
    """
    from math_verify import parse, verify  # noqa: PLC0415 - sympy: worker processes only

    found = parse(answer, parsing_timeout=None)
    if not found:
        return Grade(0.0, no_answer=True, reason="no mathematical expression in the response")
    # str() of an expression may be endless; the text that it was parsed from is beside it
    reason = "answer: " + next((text[:200] for text in found if isinstance(text, str)), "?")
    for reference in references:
        gold = parse(f"${reference}$", parsing_timeout=None) or parse(
            reference, parsing_timeout=None
        )
        if not gold:
            raise GraderFailed(f"cannot parse the reference {reference[:80]!r} as mathematics")
        if verify(gold, found, timeout_seconds=None):
            return Grade(1.0, reason=reason)
        # "no" may also mean that a comparison broke down: ask again, and let it say so
        verify(gold, found, timeout_seconds=None, raise_on_error=True)
    return Grade(0.0, reason=reason)
