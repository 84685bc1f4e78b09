"""[fleet.inherit]: read what was explicitly given to the rollout engines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from evald.config import Inherit
from evald.engines.argument import Argument, ServerArguments
from evald.engines.launch_words import (
    ENGINE_CALL,
    command_words,
    engine_call_values,
    launch_command_words,
)
from evald.engines.server_info import fetch_launch_command
from evald.errors import ConfigError

_DECODERS = {
    ".json": msgspec.json.decode,
    ".toml": msgspec.toml.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
}

#: chooses between SGLang's servers; ``sglang serve`` takes it before its parser sees it.
_MODEL_TYPE = "--model-type"


class Setting(msgspec.Struct, frozen=True):
    """A value of a server argument, and where it was given."""

    value: Any
    origin: str


class Inherited(msgspec.Struct, frozen=True, kw_only=True):
    """What was explicitly given, by field name; ``notes`` are sentences for a person."""

    settings: dict[str, Setting]
    notes: list[str] = []
    #: names that the config leaves out.
    without: list[str] = []


def read_inherited(
    inherit: Inherit,
    *,
    base: Path | None,
    arguments: ServerArguments,
    environ: Mapping[str, str],
) -> Inherited:
    """Read the one source that is set; relative paths start at ``base``. Blocks, at most 30 s.

    Inside an event loop call it in a thread. Raises ConfigError with one sentence for each fault.
    """
    base = base or Path.cwd()
    notes: list[str] = []
    if inherit.file is not None:
        path = base / Path(inherit.file).expanduser()
        settings = _from_file(path, "fleet.inherit.file", arguments)
    elif inherit.command is not None:
        words, notes = command_words(inherit.command)
        settings = _from_words(words, "[fleet.inherit] command", arguments, base=base)
    else:
        settings = _from_url(inherit, base, arguments, environ)
    return Inherited(settings=settings, notes=notes, without=inherit.without)


def _from_url(
    inherit: Inherit, base: Path, arguments: ServerArguments, environ: Mapping[str, str]
) -> dict[str, Setting]:
    url = str(inherit.url).rstrip("/")
    origin = f"[fleet.inherit] url {url}"
    command = fetch_launch_command(url, _api_key(inherit, base, environ))
    if not command.startswith(ENGINE_CALL):
        words = launch_command_words(command, arguments)
        # No base: SGLang has read its --config already, and the file is that host's.
        return _from_words(words, origin, arguments, base=None)
    try:
        values = engine_call_values(command)
    except ValueError as error:
        problem = (
            f"fleet.inherit.url: {url} was started from Python, and its call cannot be read: "
            f"{error}; give its arguments as a file"
        )
        raise ConfigError([problem]) from error
    return _from_mapping(values, origin, arguments)


def _api_key(inherit: Inherit, base: Path, environ: Mapping[str, str]) -> str | None:
    if inherit.api_key_env is not None:
        if inherit.api_key_env not in environ:
            problem = f"environment variable {inherit.api_key_env} is not set"
            raise ConfigError([f"fleet.inherit.api_key_env: {problem}"])
        return environ[inherit.api_key_env]
    if inherit.api_key_file is None:
        return None
    path = base / Path(inherit.api_key_file).expanduser()
    return _read(path, "fleet.inherit.api_key_file").decode(errors="replace").strip()


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{key}: cannot read {path}: {error.strerror}"]) from error


def _from_file(path: Path, key: str, arguments: ServerArguments) -> dict[str, Setting]:
    decode = _DECODERS.get(path.suffix.lower())
    if decode is None:
        problem = f"{key}: {path.name} must end in {', '.join(_DECODERS)}"
        raise ConfigError([problem])
    if path.exists() and not path.is_file():  # a pipe may never end
        raise ConfigError([f"{key}: cannot read {path}: it is no regular file"])
    content = _read(path, key)
    try:
        values = decode(content)
    except ImportError as error:
        problem = (
            f"{key}: cannot read {path}: the daemon's Python has no PyYAML; install it, or give "
            "the arguments as JSON or TOML"
        )
        raise ConfigError([problem]) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError([f"{key}: cannot parse {path}: {error}"]) from error
    if values is None:  # an empty YAML file
        values = {}
    if not isinstance(values, dict):
        raise ConfigError([f"{key}: {path} must hold one table of server arguments"])
    return _from_mapping(values, f"[fleet.inherit] file {path}", arguments)


def _from_mapping(
    values: Mapping[Any, Any], origin: str, arguments: ServerArguments
) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for key, value in values.items():
        argument = arguments.find(str(key), short=True)
        name = argument.dest if argument else arguments.canonical(str(key))
        if value is None:
            continue  # no value: SGLang's own default, as if it were not there
        if name in settings:
            raise ConfigError([f"{origin}: {name} is there twice, also as {key}; keep one"])
        settings[name] = Setting(argument.read(value) if argument else value, origin)
    return settings


def _from_words(
    words: Sequence[str], origin: str, arguments: ServerArguments, *, base: Path | None
) -> dict[str, Setting]:
    """Apply SGLang's own parser to words; ``base``: where a --config in them is looked for."""
    try:
        known, unknown = _parser(arguments).parse_known_args(words)
    except _BadWords as error:
        raise ConfigError([f"cannot read {origin}: {error}"]) from error
    values = vars(known)
    values.pop("model_type", None)
    config = values.pop("config", None)
    settings: dict[str, Setting] = {}
    if config is not None and base is not None:
        path = base / Path(config).expanduser()
        settings = _from_file(path, "fleet.inherit.command: --config", arguments)
    for name, value in values.items():
        argument = arguments.by_dest.get(name)
        settings[name] = Setting(argument.read(value) if argument else value, origin)
    return settings | _unknown(unknown, origin)


def _unknown(words: list[str], origin: str) -> dict[str, Setting]:
    """Keep what the installed SGLang does not know: it may be left out by name, or be refused."""
    settings: dict[str, Setting] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            option, has_value, value = word[2:].partition("=")
            name = option.replace("-", "_")
            settings[name] = Setting(value if has_value else True, origin)
        elif name is None or word.startswith("-"):
            problem = (
                f"cannot read {origin}: {word!r} is no server argument and belongs to none; "
                "SGLang's arguments begin with two dashes"
            )
            raise ConfigError([problem])
        else:
            settings[name] = Setting(word, origin)
    return settings


class _BadWords(Exception):
    """SGLang's parser would refuse these words."""


class _Parser(argparse.ArgumentParser):
    """Reads as SGLang's parser does, but keeps only what was given, and never exits."""

    def error(self, message: str) -> NoReturn:
        raise _BadWords(message)


class _StoreConst(argparse.Action):
    """An old spelling: whatever follows, it means one value of another argument."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        del parser, values, option
        setattr(namespace, self.dest, self.const)


def _parser(arguments: ServerArguments) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument(_MODEL_TYPE, dest="model_type")
    for argument in arguments.arguments:
        parser.add_argument(*_positive(argument), dest=argument.dest, **_action(argument))
    return parser


def _positive(argument: Argument) -> list[str]:
    """Return its options; argparse adds the ``--no-`` spelling of a switch by itself."""
    switch = argument.kind == "switch"
    return [o for o in argument.options if not (switch and o.startswith("--no-"))]


def _action(argument: Argument) -> dict[str, Any]:
    match argument.kind:
        case "flag":
            return {"action": "store_true"}
        case "switch":
            return {"action": argparse.BooleanOptionalAction}
        case "constant":
            return {"action": _StoreConst, "const": argument.const, "nargs": argument.nargs}
        case "optional":
            return {"nargs": "?", "const": argument.const}
        case "list":
            return {"nargs": argument.nargs}
        case "value":
            return {}
