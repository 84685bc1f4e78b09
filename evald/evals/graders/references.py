"""References of text, and the base of all graders that compare an answer with them."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from evald.config import Table
from evald.evals.graders.contract import GraderFailed, Rules
from evald.evals.graders.settings import setting_faults, setting_version

Settings = TypeVar("Settings", bound=Table)

#: floats from here on are written with an exponent.
_EXPONENT_FROM = 1e16


class NoSettings(Table, frozen=True, kw_only=True):
    """For graders without settings of their own."""


class TextGrader(Generic[Settings]):
    """What graders share whose references are text, a number, true/false, or a list of those.

    ``VERSION`` goes up when the grader would score an answer differently: journals of older
    scores are then void.
    """

    VERSION = 2

    def __init__(self, rules: Rules, kind: type[Settings]) -> None:
        self.rules = rules
        self._kind = kind

    @cached_property
    def settings(self) -> Settings:
        """The settings, checked before."""
        return msgspec.convert(self.rules.config, self._kind)

    def check(self) -> list[str]:
        """One sentence for each fault of the settings."""
        return setting_faults(self._kind, self.rules)

    def label_fault(self, label: Any) -> str | None:
        """Say what is wrong with a reference, or None."""
        try:
            reference_texts(label)
        except GraderFailed as failed:
            return str(failed)
        return None

    def version(self) -> str:
        """Name the rule and its settings."""
        return f"{self.VERSION}{setting_version(self.rules.config)}"


def normalise(text: str) -> str:
    """Strip, and make each run of white space one space; nothing else: case and digits count."""
    return " ".join(text.split())


def reference_texts(label: Any) -> list[str]:
    """Every reference as text; numbers as JSON writes them, 204.0 as 204. Raises GraderFailed."""
    labels = label if isinstance(label, list) else [label]
    texts = []
    for item in labels:
        if isinstance(item, bool):
            texts.append("true" if item else "false")
        elif isinstance(item, float) and item.is_integer() and abs(item) < _EXPONENT_FROM:
            # a column of whole numbers with a gap in it is one of floats
            texts.append(str(int(item)))
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
