"""TOML file -> ``Config``: expand ``${NAME}``, check each field, then the fields together.

All faults of a file are reported together, each as one sentence: the key, the value, what is
allowed, and what was probably meant.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evald.config import Config, Defaults, EvalSet
from evald.config_check import cross_check
from evald.config_convert import build_table, fits, join_key, lay_over
from evald.config_resolve import lay_over_preset, resolve_engines, resolve_paths
from evald.errors import ConfigError
from evald.text import hide_secrets

if TYPE_CHECKING:
    from evald.eval_yaml.reader import YamlSet

POSTURES = ("fleet", "attached", "shared", "blackbox")
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
    if path.is_fifo():  # it might never be opened, and a reload reads it again
        raise ConfigError([f"cannot read config {path}: it is a pipe; give a file"])
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
        return {k: _expand(v, environ, join_key(key, k), problems) for k, v in value.items()}
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
    return {k: v for k, v in defaults.items() if k in types and fits(types[k], v)}


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


def _posture_problem(postures: list[str]) -> str:
    allowed = ", ".join(f"[{name}]" for name in POSTURES)
    if not postures:
        return f"no posture: add exactly one of the tables {allowed}"
    return (
        f"{' and '.join(f'[{name}]' for name in postures)}: a config has exactly one posture; keep "
        f"one of {allowed}"
    )
