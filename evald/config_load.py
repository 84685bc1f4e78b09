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

from evald.config import Config, Defaults, EvalSet, Fleet, Table
from evald.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
#: exit code of a bad config (sysexits.h EX_CONFIG); systemd does not restart on it.
EXIT_CONFIG = 78


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
    sets = _inherit_defaults(raw, problems)
    config = _build(Config, {**raw, "eval": sets}, "", problems)
    if problems or config is None:
        raise ConfigError(problems)
    config = _resolve_paths(config, base)
    config = _resolve_engines(config, problems)
    problems += cross_check(config)
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> dict[str, Any]:
    """Show the resolved config as plain data, for logs and ``evald check``."""
    dumped: dict[str, Any] = msgspec.to_builtins(config)
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
    return [{**known, **s} if isinstance(s, dict) else s for s in sets]


def _fits(kind: Any, raw: Any) -> bool:
    problems: list[str] = []
    _field(kind, raw, "", problems)
    return not problems


def _build(kind: type[Table], raw: Any, key: str, problems: list[str]) -> Any:
    """Convert one table field by field, so that every fault is found and named."""
    if not isinstance(raw, dict):
        problems.append(f"{key}: expected a table, got {_show(raw)}")
        return None
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
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
        values[name] = _field(field.type, raw[name], where, problems)
    return kind(**values) if len(problems) == before else None


def _field(kind: Any, raw: Any, key: str, problems: list[str]) -> Any:
    if isinstance(kind, type) and issubclass(kind, Table):
        return _build(kind, raw, key, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], Table):
        return [_build(arguments[0], item, f"{key}[{i}]", problems) for i, item in enumerate(raw)]
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problems.append(f"{key}: {_allowed(kind, str(error))}, got {_show(raw)}{_near(kind, raw)}")
        return None


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


def _resolve_paths(config: Config, base: Path) -> Config:
    def absolute(path: str) -> str:
        return os.path.normpath(base / Path(path).expanduser())

    replace = msgspec.structs.replace
    fleet = config.fleet
    if fleet.python is not None:
        # a bare name is looked up on PATH when the engine starts
        python = fleet.python if os.sep not in fleet.python else absolute(fleet.python)
        fleet = replace(fleet, python=python)
    socket = config.status.socket
    return replace(
        config,
        staging=replace(config.staging, root=absolute(config.staging.root)),
        results=replace(config.results, dir=absolute(config.results.dir)),
        status=replace(config.status, socket=absolute(socket) if socket else None),
        fleet=replace(fleet, model=absolute(fleet.model)),
        eval=[replace(s, path=absolute(s.path)) for s in config.eval],
    )


def _resolve_engines(config: Config, problems: list[str]) -> Config:
    """Make engines, gpus and gpus_per_engine complete: any two give the third."""
    fleet = config.fleet
    engines, gpus, each = fleet.engines, fleet.gpus, fleet.gpus_per_engine
    if fleet.device == "cpu":
        if gpus or (each or 1) > 1:
            problems.append(
                f"fleet.gpus: device is 'cpu', got gpus = {gpus}, gpus_per_engine = {each}; "
                "remove both, or set fleet.device = 'cuda'"
            )
        done = msgspec.structs.replace(
            fleet, engines=1 if engines is None else engines, gpus=0, gpus_per_engine=1
        )
        return msgspec.structs.replace(config, fleet=done)
    each = each or (gpus // engines if gpus and engines and gpus % engines == 0 else 1)
    if gpus is None:
        gpus = (1 if engines is None else engines) * each
    if engines is None:
        engines = gpus // each
    if engines * each != gpus:
        problems.append(_engine_mismatch(fleet, engines, gpus, each))
    done = msgspec.structs.replace(fleet, engines=engines, gpus=gpus, gpus_per_engine=each)
    return msgspec.structs.replace(config, fleet=done)


def _engine_mismatch(fleet: Fleet, engines: int, gpus: int, each: int) -> str:
    if fleet.engines is None or fleet.gpus_per_engine is None:
        parts = each if fleet.engines is None else engines
        return f"fleet.gpus: {gpus} GPUs do not divide by {parts}; choose a multiple of {parts}"
    return (
        f"fleet.gpus: {gpus}, but engines = {engines} times gpus_per_engine = {each} makes "
        f"{engines * each}; remove one of the three"
    )


def cross_check(config: Config) -> list[str]:
    """Check what no single field can know; one sentence for each fault."""
    from evald.engines.flags import check_sglang_table  # noqa: PLC0415 (keeps config light)
    from evald.evals.graders import check_grader  # noqa: PLC0415 (keeps config light)

    problems: list[str] = []
    dispatch, staging = config.dispatch, config.staging
    if dispatch.sample_timeout_s >= dispatch.point_deadline_s:
        problems.append(
            f"dispatch.sample_timeout_s: {dispatch.sample_timeout_s:g} must be smaller than "
            f"dispatch.point_deadline_s = {dispatch.point_deadline_s:g}"
        )
    root, results = Path(staging.root), Path(config.results.dir)
    if results == root or results.is_relative_to(root):
        problems.append(
            f"results.dir: {results} lies inside the staging root {root}; results outlive "
            "snapshots, choose a directory on a disk"
        )
    elif root.is_relative_to(results):
        problems.append(f"staging.root: {root} lies inside results.dir {results}; separate them")
    model = Path(config.fleet.model)
    if staging.owned and model.is_relative_to(root):
        problems.append(
            f"fleet.model: {model} lies inside the owned staging root, where evald deletes; "
            "move the base model out"
        )
    problems += check_sglang_table(config.fleet.sglang)
    names: dict[str, int] = {}
    for i, eval_set in enumerate(config.eval):
        key = f"eval[{i}]"
        if eval_set.name in names:
            problems.append(
                f"{key}.name: {eval_set.name!r} is already the name of "
                f"eval[{names[eval_set.name]}]; names must be unique"
            )
        names.setdefault(eval_set.name, i)
        problems += [f"{key}.{sentence}" for sentence in _check_set(eval_set, config)]
        problems += [f"{key}.{sentence}" for sentence in check_grader(eval_set)]
    return problems


def _check_set(eval_set: EvalSet, config: Config) -> list[str]:
    problems = []
    deadline = eval_set.set_deadline_s
    if deadline is not None and not (
        config.dispatch.sample_timeout_s < deadline < config.dispatch.point_deadline_s
    ):
        problems.append(
            f"set_deadline_s: {deadline:g} must lie between dispatch.sample_timeout_s = "
            f"{config.dispatch.sample_timeout_s:g} and dispatch.point_deadline_s = "
            f"{config.dispatch.point_deadline_s:g}"
        )
    if eval_set.min_new_tokens > eval_set.max_response_len:
        problems.append(
            f"min_new_tokens: {eval_set.min_new_tokens} must not be larger than max_response_len "
            f"= {eval_set.max_response_len}"
        )
    if eval_set.top_k == 0 or eval_set.top_k < -1:
        problems.append(f"top_k: must be -1 (off) or at least 1, got {eval_set.top_k}")
    return problems
