"""One server argument of the installed SGLang: its names, its values, its words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

import msgspec

#: ``flag``: true or not given; ``switch``: also ``--no-x``; ``optional``: its value may be left
#: out; ``constant``: an old spelling that stores ``const`` for another argument.
Kind = Literal["flag", "switch", "value", "optional", "list", "constant"]

_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_WITH_SUFFIX = re.compile(r"(\d+)(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)")
_JSON_TYPES = ("loads", "json_list_type")


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang's own parser says about one argument."""

    #: name of the field, such as ``tp_size``.
    dest: str
    #: spellings on the command line, such as ``--tp-size`` and ``--tensor-parallel-size``.
    options: list[str]
    kind: Kind
    #: name of the function that reads one word: "str", "int", "float", "human_readable_int", ...
    type: str = "str"
    choices: list[Any] | None = None
    #: words that follow, as argparse writes it.
    nargs: str | int | None = None
    default: Any = None
    const: Any = None

    def parse(self, word: str) -> Any:
        """Turn one word of a command line into a value; text that does not fit stays text."""
        try:
            if self.type == "int":
                return int(word)
            if self.type == "float":
                return float(word)
            if self.type == "human_readable_int":
                return _human_readable_int(word)
        except ValueError:
            return word
        return word

    def read(self, value: Any) -> Any:
        """Turn a value of a file into what the argument means, where that is another type."""
        if self.kind == "list" and not isinstance(value, list):
            value = [value]
        if isinstance(value, list) and self.kind == "list":
            return [self.parse(item) if isinstance(item, str) else item for item in value]
        return self.parse(value) if isinstance(value, str) else value

    def problem(self, value: Any) -> str | None:
        """Say what is allowed if ``value``, as ``read()`` returned it, is not."""
        if self.kind in ("flag", "switch"):
            return None if isinstance(value, bool) else "must be true or false"
        if self.kind == "list":
            faults = (self._item_problem(item) for item in value)
            return next((f"each item {fault}" for fault in faults if fault), None)
        if self.kind == "optional" and value is True:
            return None
        return self._item_problem(value)

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that say ``value``; none where nothing says it."""
        if self.kind == "switch":
            return [self.options[0] if value else self._negative()]
        if self.kind != "list" and isinstance(value, list):
            value = json.dumps(value)  # one word, which SGLang reads as JSON
        return option_words(self.options[0], value)

    def _negative(self) -> str:
        return next(option for option in self.options if option.startswith("--no-"))

    def _item_problem(self, value: Any) -> str | None:
        if self.choices is not None:
            if value in self.choices and not isinstance(value, bool):
                return None
            listed = "must be one of " + ", ".join(_shown(choice) for choice in self.choices)
            names = [choice for choice in self.choices if isinstance(choice, str)]
            near = difflib.get_close_matches(str(value), names, n=1)
            return f'{listed}; did you mean "{near[0]}"?' if near else listed
        allowed = {
            "int": (int, "must be a whole number"),
            "human_readable_int": (int, "must be a whole number, or text such as '16k' or '16Ki'"),
            "float": (int | float, "must be a number"),
            "str": (str | dict, "must be text, or a table (passed as JSON)"),
            **dict.fromkeys(_JSON_TYPES, (dict | list | str, "must be a table or a list")),
        }
        kind, sentence = allowed.get(self.type, (object, "must be text, a number or a table"))
        if isinstance(value, bool) or not isinstance(value, kind):
            return sentence
        return None


class ServerArguments(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All server arguments of one SGLang."""

    #: version of the installed package.
    version: str
    arguments: list[Argument]

    @cached_property
    def by_dest(self) -> Mapping[str, Argument]:
        """Field name -> argument; old spellings that store a constant are not in it."""
        return {a.dest: a for a in reversed(self.arguments) if a.kind != "constant"}

    def find(self, name: str, *, short: bool = False) -> Argument | None:
        """Return the argument that ``name`` spells, with dashes or underscores.

        ``short``: also an unambiguous beginning, which SGLang takes on its command line.
        """
        plain = name.replace("-", "_")
        if plain in self._by_name or not short or not plain:
            return self._by_name.get(plain)
        longer = [a for known, a in self._by_name.items() if known.startswith(plain)]
        return longer[0] if len({a.dest for a in longer}) == 1 else None

    def canonical(self, name: str) -> str:
        """Return the field name behind ``name``; an unknown name only gets its underscores."""
        found = self.find(name)
        return found.dest if found else name.replace("-", "_")

    def suggest(self, name: str) -> str | None:
        """Return the name that was probably meant."""
        plain = name.replace("-", "_")
        near = difflib.get_close_matches(plain, self._by_name, n=1, cutoff=0.6)
        longer = sorted(known for known in self._by_name if known.startswith(plain))
        return next(iter(near or longer), None)

    @cached_property
    def _by_name(self) -> Mapping[str, Argument]:
        names: dict[str, Argument] = {}
        for argument in self.by_dest.values():
            for option in argument.options:
                if not (argument.kind == "switch" and option.startswith("--no-")):
                    names[option.lstrip("-").replace("-", "_")] = argument
        # A field's name wins over another argument's option of the same spelling.
        return {**names, **self.by_dest}


def option_words(option: str, value: Any) -> list[str]:
    """Return the words of an option: true is a bare flag, a list several words, a table JSON."""
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [option]
    words = [_word(item) for item in (value if isinstance(value, list) else [value])]
    if len(words) == 1:
        # One word, so that a value that begins with a dash is not taken for a flag.
        return [f"{option}={words[0]}"]
    return [option, *words]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _human_readable_int(word: str) -> int:
    match = _WITH_SUFFIX.fullmatch(word.strip())
    if match is None:
        return int(word)
    number, fraction, suffix = match.groups(default="")
    if suffix in _IEC:
        return int(number + fraction) * _IEC[suffix]
    return int(Decimal(number + fraction) * _SI[suffix])


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
