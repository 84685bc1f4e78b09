"""TOML file -> ``Config``: expand ``${NAME}``, check each field, then the fields together.

All faults of a file are reported together, each as one sentence: the key, the value, what is
allowed, and what was probably meant.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from evald.config import Config, Defaults, Table
from evald.config_check import cross_check
from evald.config_resolve import lay_over_preset, resolve_engines, resolve_paths
from evald.errors import ConfigError
from evald.text import hide_secrets

POSTURES = ("fleet", "attached", "shared", "blackbox")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load_config(path: Path, *, environ: Mapping[str, str] = os.environ) -> Config:
    """Read, check and resolve a config file.

    Raises ConfigError with one sentence for each fault.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot read config {path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"cannot read config {path}: not UTF-8 at byte {error.start}"]
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"cannot parse config {path}: {error}"]) from error
    return build_config(raw, base=path.resolve().parent, environ=environ)


def build_config(raw: dict[str, Any], *, base: Path, environ: Mapping[str, str]) -> Config:
    """Turn a parsed TOML document into a resolved config; ``base`` anchors relative paths."""
    problems: list[str] = []
    raw = _expand(raw, environ, "", problems)
    raw = lay_over_preset(raw, problems)
    sets = _inherit_defaults(raw, problems)
    postures = [name for name in POSTURES if name in raw]
    if len(postures) != 1:
        problems.append(_posture_problem(postures))
    config = build_table(Config, {**raw, "eval": sets}, "", problems)
    if problems or config is None:
        raise ConfigError(problems)
    config = resolve_paths(config, base)
    if config.fleet is not None:
        config = msgspec.structs.replace(config, fleet=resolve_engines(config.fleet, problems))
    problems += cross_check(config)
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> dict[str, Any]:
    """Show the resolved config as plain data, for logs and ``evald check``."""
    dumped: dict[str, Any] = msgspec.to_builtins(config)
    if config.fleet is not None and config.fleet.inherit is not None:
        command = config.fleet.inherit.command
        dumped["fleet"]["inherit"]["command"] = command and hide_secrets(command)
    if config.blackbox is not None:
        dumped["blackbox"]["env"] = dict.fromkeys(config.blackbox.env, "(hidden)")
    return dumped


def _expand(value: Any, environ: Mapping[str, str], key: str, problems: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, environ, _join(key, k), problems) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, environ, f"{key}[{i}]", problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or key.endswith(".regex"):
        return value

    def substitute(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in environ:
            return environ[name]
        if default is None:
            problems.append(
                f"{key}: environment variable {name} is not set; "
                f"set it, or write ${{{name}:-default}}"
            )
            return match[0]  # not an empty text, which would be a second fault
        return default

    return _VARIABLE.sub(substitute, value)


def _inherit_defaults(raw: dict[str, Any], problems: list[str]) -> list[Any]:
    """Lay each [[eval]] table over [defaults], so that a set is complete by itself."""
    sets = raw.get("eval")
    if sets is None:
        if "blackbox" not in raw:
            problems.append("eval: missing; add at least one [[eval]] table with name and path")
        return []
    if not isinstance(sets, list) or not sets:
        problems.append("eval: must be one or more [[eval]] tables with name and path")
        return []
    defaults = raw.get("defaults", {})
    if not isinstance(defaults, dict):
        return sets  # reported where [defaults] itself is built
    types = {field.name: field.type for field in msgspec.structs.fields(Defaults)}
    # a bad default is one fault of [defaults], not one of every set
    known = {k: v for k, v in defaults.items() if k in types and _fits(types[k], v)}
    return [_over(known, s) if isinstance(s, dict) else s for s in sets]


def _over(defaults: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Lay a set's table over the defaults; settings of another grader are not for its own."""
    grader = defaults.get("grader", Defaults().grader)
    if table.get("grader", grader) != grader:
        defaults = {k: v for k, v in defaults.items() if k != "grader_config"}
    return {**defaults, **table}


def _fits(kind: Any, raw: Any) -> bool:
    problems: list[str] = []
    _field(kind, raw, "", problems)
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
    problems += [_unknown(_join(key, name), name, list(fields)) for name in unknown]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _join(key, name)
        if name not in raw:
            if field.required:
                problems.append(f"{where}: missing; it must be set")
            continue
        values[field.name] = _field(field.type, raw[name], where, problems)
    return kind(**values) if len(problems) == before else None


def _field(kind: Any, raw: Any, key: str, problems: list[str]) -> Any:
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
        problems.append(f"{key}: {_allowed(kind, str(error))}, got {_show(raw)}{_near(kind, raw)}")
        return None


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Table)


def _posture_problem(postures: list[str]) -> str:
    allowed = ", ".join(f"[{name}]" for name in POSTURES)
    if not postures:
        return f"no posture: add exactly one of the tables {allowed}"
    return (
        f"{' and '.join(f'[{name}]' for name in postures)}: a config has exactly one posture; keep "
        f"one of {allowed}"
    )


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
    for meta in getattr(kind, "__metadata__", ()):
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


def _unknown(key: str, name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{key}: unknown key; {hint}allowed here: {', '.join(sorted(allowed))}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 (one line)
