"""The page's modules as one script: a file on a disk cannot import others."""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable

#: how the page's own modules write these; nothing else is understood, and a test sees to it.
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundle(directory: Traversable, entry: str) -> str:
    """Return ``entry`` and all that it imports as one classic script, each module in its scope."""
    modules: dict[str, str] = {}
    _add(directory, entry, modules)
    return '"use strict";\nconst modules = {};\n' + "".join(modules.values())


def _add(directory: Traversable, name: str, modules: dict[str, str]) -> None:
    """Add a module behind those that it needs; modules need each other in one direction only."""
    text = (directory / name).read_text(encoding="utf-8")
    for match in _IMPORT.finditer(text):
        if match[2] not in modules:
            _add(directory, match[2], modules)
    exports = ", ".join(_EXPORT.findall(text))
    text = _IMPORT.sub(r'const { \1 } = modules["\2"];', _EXPORT.sub("", text))
    modules[name] = f'modules["{name}"] = (() => {{\n{text}return {{ {exports} }};\n}})();\n'
