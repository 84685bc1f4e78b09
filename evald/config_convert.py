"""Plain values -> the types of the config: field by field, so that every fault is named.

Each fault is one sentence: the key, the value, what is allowed, and what was probably meant.
"""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any

import msgspec

from evald.config import Defaults, Table

#: what others call a key, where its letters do not lead to ours.
_SYNONYMS = {
    "max_tokens": "max_response_len",
    "max_new_tokens": "max_response_len",
    "max_output_tokens": "max_response_len",
    "n": "n_samples_per_eval_prompt",
    "num_samples": "n_samples_per_eval_prompt",
    "dataset": "path",
    "file": "path",
}


def lay_over(defaults: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Lay a set's table over the defaults; settings of another grader are not for its own."""
    if table.get("kind") == "procedural":
        # such a set brings its own
        table = {"grader": "reasoning_gym", **table}
    grader = defaults.get("grader", Defaults().grader)
    if table.get("grader", grader) != grader:
        defaults = {k: v for k, v in defaults.items() if k != "grader_config"}
    return {**defaults, **table}


def fits(kind: Any, raw: Any) -> bool:
    """Tell whether a value can be converted to the type of a field."""
    problems: list[str] = []
    convert_field(kind, raw, "", problems)
    return not problems


def build_table(kind: type[Table], raw: Any, key: str, problems: list[str]) -> Any:
    """Convert one table field by field, so that every fault is found and named.

    Faults are added to ``problems``; ``key`` is the table's own. None when there is one.
    """
    if not isinstance(raw, dict):
        problems.append(f"{key}: expected a table, got {_show(raw)}")
        return None
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    before = len(problems)
    unknown = [name for name in raw if name not in fields]
    problems += [unknown_key(join_key(key, name), name, list(fields)) for name in unknown]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = join_key(key, name)
        if name not in raw:
            if field.required:
                problems.append(f"{where}: missing; it must be set")
            continue
        values[field.name] = convert_field(field.type, raw[name], where, problems)
    return kind(**values) if len(problems) == before else None


def convert_field(kind: Any, raw: Any, key: str, problems: list[str]) -> Any:
    """Convert one value to the type of its field; a fault is added to ``problems``."""
    tables = [t for t in (kind, *typing.get_args(kind)) if _is_table(t)]
    if tables and typing.get_origin(kind) is not list:
        return build_table(tables[0], raw, key, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and _is_table(arguments[0]) and isinstance(raw, list):
        items = enumerate(raw)
        return [build_table(arguments[0], item, f"{key}[{i}]", problems) for i, item in items]
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        allowed = _allowed(kind, str(error))
        problems.append(f"{key}: {allowed}, got {_show(raw)}{_near(kind, raw)}")
        return None


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Table)


def _allowed(kind: Any, message: str) -> str:
    """Say what is allowed; msgspec names types and bounds, but not the values of a Literal."""
    choices = _choices(kind)
    if choices:
        return "must be one of " + ", ".join(_show(c) for c in choices)
    if described := _description(kind):
        return f"must be {described}"
    message = message.split(" - at ", maxsplit=1)[0].replace("`", "")
    message = message[0].lower() + message[1:].replace(", got " + message.split(", got ")[-1], "")
    return message.replace(" | null", "")  # TOML has no null: a key is there or not


def _description(kind: Any) -> str | None:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    for member in typing.get_args(kind) if is_union else [kind]:
        for meta in getattr(member, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return None


def _choices(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [c for member in typing.get_args(kind) for c in _choices(member)]
        return [*found, True, False] if found and bool in typing.get_args(kind) else found
    return []


def _near(kind: Any, raw: Any) -> str:
    names = [c for c in _choices(kind) if isinstance(c, str)]
    near = difflib.get_close_matches(raw, names, n=1) if isinstance(raw, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_key(key: str, name: str, allowed: list[str]) -> str:
    """Say that a key is not known, and which one was probably meant."""
    meant = meant_key(name, allowed)
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"{key}: unknown key; {hint}allowed here: {', '.join(sorted(allowed))}"


def meant_key(name: str, allowed: list[str]) -> str | None:
    """Return which key was probably meant by one that is not known."""
    if _SYNONYMS.get(name) in allowed:
        return _SYNONYMS[name]
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    return near[0] if near else None


def join_key(key: str, name: str) -> str:
    """Return the name of a key within the table ``key``."""
    return f"{key}.{name}" if key else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 (one line)
