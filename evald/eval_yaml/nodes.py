"""YAML as it was written: text stays text, and every value knows its line.

YAML takes ``no`` for false, ``2024`` for a number and ``1e3`` for text. What a value means is
decided here by whoever reads it, not by its looks. Environment variables are filled in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from evald.errors import ConfigError

#: values of one file, with all its aliases written out; and lists and mappings inside one another.
_MAX_VALUES = 50_000
_MAX_DEPTH = 50

_STANDARD = "tag:yaml.org,2002:"
_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "value", "map", "seq")

#: an escaped dollar, or what stands in ${...}.
_REFERENCE = re.compile(r"\\\$\{|\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"(?:oc\.env:)?([A-Za-z_][A-Za-z0-9_]*)(?:(?::-|,)(.*))?", re.DOTALL)

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][\d_]*)")
_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Node(msgspec.Struct, frozen=True):
    """One value; ``line`` (from 1) is its own, or that of its key."""

    line: int
    #: text as it was written, a list, a mapping; None for null.
    value: str | list[Node] | dict[str, Node] | None
    #: what YAML takes a text for: "int", "float", "bool", or "str".
    looks: str = "str"


def read_yaml(text: str, source: str, environ: Mapping[str, str], problems: list[str]) -> Node:
    """Read one document; faults of single values are added to ``problems``.

    ``source`` names the file in sentences. Raises ConfigError when it cannot be read at all.
    """
    import yaml  # noqa: PLC0415 (most configs have no YAML)

    try:
        root: Any = yaml.compose(text.removeprefix("\ufeff"), Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ConfigError([f"cannot parse {source}: too many brackets in one another"]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source} line {mark.line + 1}"
        cause = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError([f"cannot parse {where}: {cause}"]) from error
    if root is None:
        raise ConfigError([f"cannot read {source}: it is empty"])
    return _Reader(source, environ, problems).read(root, 0)


class _Reader:
    def __init__(self, source: str, environ: Mapping[str, str], problems: list[str]) -> None:
        self._source = source
        self._environ = environ
        self._problems = problems
        self._values = 0

    def read(self, node: Any, depth: int) -> Node:
        """Convert a node of the parser's."""
        line = node.start_mark.line + 1
        self._values += 1
        if depth > _MAX_DEPTH or self._values > _MAX_VALUES:
            problem = (
                f"cannot read {self._source} line {line}: more than {_MAX_VALUES} values, or more "
                f"than {_MAX_DEPTH} of them in one another (an alias of itself?)"
            )
            raise ConfigError([problem])
        tag = node.tag.removeprefix(_STANDARD)
        if tag not in _TAGS:
            self._fault(line, f"the tag {node.tag!r} is not supported; remove it")
            tag = "str"
        if node.id == "sequence":
            return Node(line, [self.read(item, depth + 1) for item in node.value])
        if node.id == "mapping":
            return Node(line, self._mapping(node, depth))
        if tag == "null":
            return Node(line, None)
        if tag == "str" and node.style is None and _EXPONENT.fullmatch(node.value):
            tag = "float"  # 1e3: a number for everybody but YAML 1.1
        looks = tag if tag in {"int", "float", "bool"} else "str"
        return Node(line, self._expand(node.value, line), looks)

    def _mapping(self, node: Any, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                self._fault(line, "a list or a mapping cannot be a key; write a name")
            elif key.tag == f"{_STANDARD}merge":
                self._merge(value, merged, depth)
            elif key.value in own:
                first = own[key.value].line
                self._fault(line, f"key {key.value!r} is there twice (line {first}); keep one")
            else:
                own[key.value] = msgspec.structs.replace(self.read(value, depth + 1), line=line)
        return merged | own

    def _merge(self, value: Any, merged: dict[str, Node], depth: int) -> None:
        """``<<``: what is in one mapping, or in several, the first of which wins."""
        for one in value.value if value.id == "sequence" else [value]:
            if one.id != "mapping":
                self._fault(one.start_mark.line + 1, "<< wants a mapping, such as <<: *common")
                continue
            content = self.read(one, depth + 1).value
            for name, node in content.items() if isinstance(content, dict) else ():
                merged.setdefault(name, node)

    def _expand(self, text: str, line: int) -> str:
        def fill(match: re.Match[str]) -> str:
            if match[1] is None:
                return "${"
            variable = _VARIABLE.fullmatch(match[1].strip())
            if variable is None:
                self._fault(
                    line,
                    f"{match[0]} names no environment variable; write ${{NAME}} or "
                    "${NAME:-default} (miles: ${oc.env:NAME,default})",
                )
                return match[0]
            name, default = variable[1], variable[2]
            if name in self._environ:
                return self._environ[name]
            if default is None:
                self._fault(
                    line,
                    f"environment variable {name} is not set; set it, or write "
                    f"${{{name}:-default}}",
                )
                return match[0]
            return str(default).strip().strip("\"'")

        return _REFERENCE.sub(fill, text)

    def _fault(self, line: int, sentence: str) -> None:
        self._problems.append(f"{self._source} line {line}: {sentence}")


# --- what a value means ---------------------------------------------------------------------------


class Misread(Exception):
    """A value is not what it should be; the text says what that is."""


def as_text(node: Node) -> str:
    """Take a single value as the text that was written."""
    if not isinstance(node.value, str):
        raise Misread("text")
    return node.value


def as_int(node: Node) -> int:
    """Take a whole number in decimal digits, quoted or not; 1e4 is one, too."""
    text = node.value if isinstance(node.value, str) else ""
    if _DECIMAL.fullmatch(text):
        return int(text)
    if not _NUMBER.fullmatch(text) or not (number := float(text)).is_integer():
        raise Misread("a whole number")
    return int(number)


def as_float(node: Node) -> float:
    """Take a number, quoted or not."""
    text = node.value if isinstance(node.value, str) else ""
    if _DECIMAL.fullmatch(text):
        return float(text)
    if not _NUMBER.fullmatch(text) or not math.isfinite(number := float(text)):
        raise Misread("a number")
    return number


def as_bool(node: Node) -> bool:
    """Take true or false, in any of YAML's spellings."""
    found = _BOOLEANS.get(node.value.lower()) if isinstance(node.value, str) else None
    if found is None:
        raise Misread("true or false")
    return found


def as_list(node: Node, item: Callable[[Node], Any]) -> list[Any]:
    """Take a list, or a single value as a list of one."""
    if isinstance(node.value, list):
        return [item(one) for one in node.value]
    return [item(node)]


def as_mapping(node: Node) -> dict[str, Any]:
    """Take a mapping whose values are what they look like."""
    if not isinstance(node.value, dict):
        raise Misread("a mapping")
    return {name: as_anything(one) for name, one in node.value.items()}


def as_anything(node: Node) -> Any:
    """Take a value for what it looks like, as miles does: ``no`` is false, a date is text."""
    if isinstance(node.value, list):
        return [as_anything(one) for one in node.value]
    if isinstance(node.value, dict):
        return as_mapping(node)
    if node.looks == "bool":
        return as_bool(node)
    if node.looks in {"int", "float"}:
        try:
            return as_int(node) if _DECIMAL.fullmatch(node.value or "") else as_float(node)
        except Misread:
            pass  # 0x1f, 1:30, .inf: what was written
    return node.value
