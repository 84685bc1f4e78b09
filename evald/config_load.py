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
from typing import TYPE_CHECKING, Any

import msgspec

from evald.config import Config, Defaults, EvalSet, Table
from evald.config_check import cross_check
from evald.config_resolve import lay_over_preset, resolve_engines, resolve_paths
from evald.errors import ConfigError
from evald.text import hide_secrets

if TYPE_CHECKING:
    from evald.eval_yaml.reader import YamlSet

POSTURES = ("fleet", "attached", "shared", "blackbox")
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
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load_config(path: Path, *, environ: Mapping[str, str] = os.environ) -> Config:
    """Read, check and resolve a config file.

    Raises ConfigError with one sentence for each fault.
    """
    try:
        return build_config(_parse(path), base=path.resolve().parent, environ=environ)
    except RecursionError as error:
        raise ConfigError([f"cannot parse config {path}: it is nested too deep"]) from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot read config {path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"cannot read config {path}: not UTF-8 at byte {error.start}"]
        ) from error
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise ConfigError([f"cannot parse config {path}: {error}"]) from error


def build_config(raw: dict[str, Any], *, base: Path, environ: Mapping[str, str]) -> Config:
    """Turn a parsed TOML document into a resolved config; ``base`` anchors relative paths."""
    problems: list[str] = []
    raw = _expand(raw, environ, "", problems)
    raw = lay_over_preset(raw, problems)
    defaults = _good_defaults(raw)
    sets = _inherit_defaults(raw, defaults, problems)
    more = _read_yaml_sets(raw, defaults, base, environ, problems)
    postures = [name for name in POSTURES if name in raw]
    if len(postures) != 1:
        problems.append(_posture_problem(postures))
    config = build_table(Config, {**raw, "eval": sets}, "", problems)
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    places = [f"eval[{i}]" for i in range(len(sets))] + [one.where for one in more]
    sets = [*config.eval, *(one.eval_set for one in more)]
    config = resolve_paths(msgspec.structs.replace(config, eval=sets), base)
    if config.fleet is not None:
        config = msgspec.structs.replace(config, fleet=resolve_engines(config.fleet, problems))
    problems += cross_check(config, places)
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config, *, brief: bool = False) -> dict[str, Any]:
    """Show the resolved config as plain data, for logs and ``evald check``.

    ``brief``: of each eval set only its name and what differs from ``[defaults]``.
    """
    dumped: dict[str, Any] = msgspec.to_builtins(config)
    if brief:
        inherited = EvalSet(name="", **msgspec.structs.asdict(config.defaults))
        usual = msgspec.to_builtins(inherited)
        dumped["eval"] = [
            {key: value for key, value in one.items() if value != usual[key]}
            for one in dumped["eval"]
        ]
    if config.fleet is not None and config.fleet.inherit is not None:
        command = config.fleet.inherit.command
        dumped["fleet"]["inherit"]["command"] = command and hide_secrets(command)
    if config.blackbox is not None:
        dumped["blackbox"]["env"] = dict.fromkeys(config.blackbox.env, "(hidden)")
    if config.eval_config is not None and config.eval_config.startswith("base64:"):
        dumped["eval_config"] = "base64:..."  # its sets stand in eval
    return dumped


def _expand(value: Any, environ: Mapping[str, str], key: str, problems: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, environ, _join(key, k), problems) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, environ, f"{key}[{i}]", problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or key.endswith((".regex", ".answer_pattern")):
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


def _good_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what can be used of [defaults]; the rest is reported where the table is built.

    A bad default is one fault of [defaults], not one of every set.
    """
    defaults = raw.get("defaults", {})
    if not isinstance(defaults, dict):
        return {}
    types = {field.name: field.type for field in msgspec.structs.fields(Defaults)}
    return {k: v for k, v in defaults.items() if k in types and _fits(types[k], v)}


def _read_yaml_sets(
    raw: dict[str, Any],
    defaults: dict[str, Any],
    base: Path,
    environ: Mapping[str, str],
    problems: list[str],
) -> list[YamlSet]:
    """Read the sets of ``eval_config``, if there is one."""
    if not isinstance(raw.get("eval_config"), str):
        return []
    # most configs have none
    from evald.eval_yaml.reader import read_eval_config  # noqa: PLC0415

    return read_eval_config(
        raw["eval_config"], base=base, environ=environ, defaults=defaults, problems=problems
    )


def _inherit_defaults(
    raw: dict[str, Any], defaults: dict[str, Any], problems: list[str]
) -> list[Any]:
    """Lay each [[eval]] table over [defaults], so that a set is complete by itself."""
    sets = raw.get("eval")
    if sets is None:
        if "blackbox" not in raw and "eval_config" not in raw:
            problems.append(
                "eval: missing; add at least one [[eval]] table with name and path, or eval_config"
            )
        return []
    if not isinstance(sets, list) or not sets:
        problems.append("eval: must be one or more [[eval]] tables with name and path")
        return []
    return [lay_over(defaults, s) if isinstance(s, dict) else s for s in sets]


def lay_over(defaults: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Lay a set's table over the defaults; settings of another grader are not for its own."""
    if table.get("kind") == "procedural":
        # such a set brings its own
        table = {"grader": "reasoning_gym", **table}
    grader = defaults.get("grader", Defaults().grader)
    if table.get("grader", grader) != grader:
        defaults = {k: v for k, v in defaults.items() if k != "grader_config"}
    return {**defaults, **table}


def _fits(kind: Any, raw: Any) -> bool:
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
    problems += [unknown_key(_join(key, name), name, list(fields)) for name in unknown]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _join(key, name)
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


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 (one line)
