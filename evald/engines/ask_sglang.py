"""Ask the SGLang of an environment about itself: ``python ask_sglang.py identity|arguments [DIR]``.

Run by path in the engine's own Python environment, which need not have evald. One JSON value on
standard output. DIR is appended to the module path when ``sgl_kernel`` is missing (CPU mode).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: an old spelling that stores a constant: SGLang's own class, so known by its name only.
_OLD_CONSTANT = "DeprecatedStoreConstAction"


def identity() -> dict[str, Any]:
    """Say which SGLang this is, in milliseconds: it is found, but not imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise SystemExit("no module named sglang")
    # A package may be a checkout that changes under one version, so its files count, too.
    srt = [Path(folder) / "srt" for folder in spec.submodule_search_locations or []]
    parsed = [path for folder in srt for path in folder.glob("server_args.py")]
    parsed += [path for folder in srt for path in folder.glob("arg_groups/**/*.py")]
    changed_ns = max((path.stat().st_mtime_ns for path in parsed), default=0)
    return {
        "version": importlib.metadata.version("sglang"),
        "python": sys.executable,
        "folders": [str(folder) for folder in srt],
        "changed_ns": changed_ns,
    }


def arguments(standin: str | None) -> list[dict[str, Any]]:
    """Import SGLang's parser, plugins included as its launcher does, and describe it."""
    if standin is not None and importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(standin)
    if importlib.util.find_spec("sglang.srt.plugins") is not None:
        importlib.import_module("sglang.srt.plugins").load_plugins()
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return describe(parser)


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return what a parser's actions say, as plain data."""
    described = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its actions
        if action.option_strings and not isinstance(action, argparse._HelpAction):  # noqa: SLF001
            choices = None if action.choices is None else list(action.choices)
            if isinstance(action.choices, set):
                choices = sorted(action.choices)  # one order, whatever the hash seed
            described.append({
                "dest": action.dest,
                "options": list(action.option_strings),
                "kind": _kind(action),
                "type": "str" if action.type is None else getattr(action.type, "__name__", "other"),
                "choices": choices,
                "nargs": action.nargs,
                "default": action.default,
                "const": getattr(action, "const_value", action.const),
            })  # fmt: skip
    return described


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if type(action).__name__ == _OLD_CONSTANT:
        return "constant"
    if action.nargs == 0:
        return "flag" if action.const is True else "constant"
    if action.nargs == "?":
        return "optional"
    return "value" if action.nargs is None else "list"


def main() -> None:
    """Answer on standard output; whatever the imports print goes to standard error."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    # Running by path put this folder first on the path; its modules must not shadow others.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    what, standin = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None  # noqa: PLR2004
    answer: Any = identity() if what == "identity" else arguments(standin)
    with os.fdopen(answer_to, "w", encoding="utf-8") as file:
        json.dump(answer, file, default=str)


if __name__ == "__main__":
    main()
