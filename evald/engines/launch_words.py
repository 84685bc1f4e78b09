"""The words of a rollout engine's command line, in the forms that people and SGLang write them."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import PurePath
from typing import Any

from evald.engines.argument import ServerArguments
from evald.errors import ConfigError

_KEY = "fleet.inherit.command"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=.*", re.DOTALL)
_SHELL = re.compile(r"\d*(>|<|\||&|;)")
#: how SGLang shows a server that was made by its Python class.
ENGINE_CALL = "Engine("


def command_words(command: str) -> tuple[list[str], list[str]]:
    """Return the server's arguments in a pasted command line, and notes for a person.

    What stands before the arguments (environment, docker, python, ``sglang serve MODEL``) and what
    the shell would keep for itself (redirections) is dropped. Raises ConfigError.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", command))
    except ValueError as error:
        raise ConfigError([f"{_KEY}: cannot split it into words: {error}"]) from error
    start = _after_program(words)
    before, words = words[:start], words[start:]
    end = next((i for i, word in enumerate(words) if _SHELL.match(word)), len(words))
    return words[:end], _notes(before)


def _after_program(words: list[str]) -> int:
    """Return the index of the first server argument."""
    for i, word in enumerate(words):
        if word == "sglang.launch_server" or PurePath(word).name == "launch_server.py":
            return i + 1
        if word == "serve" and i > 0 and PurePath(words[i - 1]).name == "sglang":
            # "sglang serve MODEL": the model may come without its option.
            return i + 2 if i + 1 < len(words) and not words[i + 1].startswith("-") else i + 1
    start = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), 0)
    if start < len(words) and not words[start].startswith("--"):
        problem = (
            f"{_KEY}: must hold 'sglang serve' or 'python -m sglang.launch_server', or begin with "
            f"a server argument such as --tp-size, got {words[start]!r}"
        )
        raise ConfigError([problem])
    return start


def _notes(before: list[str]) -> list[str]:
    """Name the environment, not its values: they may be secrets."""
    names = [match[1] for word in before if (match := _ASSIGNMENT.fullmatch(word))]
    if not names:
        return []
    note = (
        f"[fleet.inherit] command: environment is not inherited: {', '.join(names)}; set what the "
        "engines need for the daemon, and name in [fleet] pass_env what does not reach them"
    )
    return [note]


def launch_command_words(launch_command: str, arguments: ServerArguments) -> list[str]:
    """Return the words of ``launch_command`` of /server_info.

    SGLang joins them with spaces and without quotes, so a value with spaces in it, such as JSON,
    is put together again: it lasts until the next word that begins with ``--``.
    """
    options: list[list[str]] = []
    for word in launch_command.split(" "):
        if word.startswith("--") or not options:
            options.append([])
        options[-1].append(word)
    words: list[str] = []
    for name, *rest in options:
        argument = arguments.find(name.removeprefix("--"), short=True)
        if "=" in name:
            words.append(" ".join([name, *rest]))
        elif argument is not None and argument.kind in ("value", "optional") and rest:
            words.append(f"{name}={' '.join(rest)}")
        else:
            words += [name, *_items(rest)]
    return words


def _items(words: list[str]) -> list[str]:
    """Put together the words of each JSON object of a list."""
    items: list[str] = []
    depth = 0
    for word in words:
        if depth > 0:
            items[-1] += f" {word}"
        elif word:
            items.append(word)
        depth = max(depth + word.count("{") - word.count("}"), 0)
    return items


def engine_call_values(call: str) -> dict[str, Any]:
    """Return the keyword arguments of ``Engine(model_path='...', tp_size=8, ...)``.

    Raises ValueError when one of them is no plain value.
    """
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError as error:
        raise ValueError("it holds more than plain values") from error
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError("it is no call with named arguments only")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
