"""Grader ``choice``: the letter that a response chooses."""

from __future__ import annotations

import re
from typing import Any

from evald.evals.graders.boxed import last_boxed
from evald.evals.graders.contract import Grade, Rules, Sample, answered, no_answer
from evald.evals.graders.references import NoSettings, TextGrader, reference_texts

_TEXT_MACRO = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
#: what may stand before and behind a letter: brackets, markdown, dollar signs. All counts are
#: bounded, so that no response makes matching slow.
_OPEN, _CLOSE = r"[\s(\[{*_$\"'`]{0,6}", r"[)\]}*_$\"'`]{0,4}"


class Choice(TextGrader[NoSettings]):
    """The letter (of ``choices``) that a response chooses, by the rules of ``choice_letter``."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, NoSettings)

    def check(self) -> list[str]:
        """One sentence for each fault, of the letters too."""
        problems = super().check()
        choices = self.rules.choices
        if len(set(choices)) != len(choices):
            problems.append(f"choices: {choices!r} has a letter twice; name each once")
        return problems

    def label_fault(self, label: Any) -> str | None:
        """Say whether a reference is no letter."""
        if fault := super().label_fault(label):
            return fault
        choices = self.rules.choices
        wrong = [text for text in reference_texts(label) if _as_choice(text, choices) is None]
        if wrong:
            return f"the reference {wrong[0]!r} is none of the letters {choices!r}"
        return None

    def grade(self, sample: Sample) -> Grade:
        """Find the letter and compare it."""
        choices = self.rules.choices
        found = choice_letter(sample.response, choices)
        if found is None:
            return no_answer(f"none of the letters {choices} is chosen")
        wanted = {_as_choice(text, choices) for text in reference_texts(sample.label)}
        return answered(found, found in wanted)


def choice_letter(response: str, choices: str) -> str | None:
    r"""Give the letter that a response chooses; the first rule that finds one decides.

    1. The whole response is the letter, perhaps in brackets or markdown, in any case: ``(b)``.
    2. The last ``answer is X``, ``answer: X``, ``<answer>X``.
    3. The last ``\boxed{X}``, also ``\boxed{X. because}`` and ``\boxed{(X) because}``.
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
    said = re.findall(rf"(?i:answer)(?i: is)? ?[:>]?{_OPEN}(?:\\boxed{_OPEN})?{alone}", text)
    if said:
        return str(said[-1])
    if boxed := last_boxed(text):
        begins = re.match(rf"[\s*_$\"'`]{{0,6}}(?:\({letter}\)|{letter} ?[.):])", boxed)
        return _bare_letter(boxed, choices) or (begins[1] or begins[2] if begins else None)
    if begins := re.match(rf"[\s*_$\"'`]{{0,6}}{letter} ?[.):]", text):
        return begins.group(1)
    marked = re.findall(rf"\({letter}\)|\*\*{_OPEN}{letter}[.:]?{_CLOSE}\*\*", text)
    if marked:
        return "".join(marked[-1])
    lines = text.strip().splitlines()
    return _bare_letter(lines[-1], choices) if lines else None


def _as_choice(text: str, choices: str) -> str | None:
    """Give the letter that ``text`` is and nothing more, in the config's own case."""
    text = text.strip()
    if len(text) != 1:
        return None
    if text in choices:
        return text
    folded = [letter for letter in choices if letter.casefold() == text.casefold()]
    return folded[0] if len(folded) == 1 else None


def _bare_letter(text: str, choices: str) -> str | None:
    """Give the letter if there is nothing but brackets, markdown and a full stop around it."""
    return _as_choice(text.strip(" \t\r\n()[]{}*_$\"'`.:,"), choices)
