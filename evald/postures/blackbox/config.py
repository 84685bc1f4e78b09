"""What the table [blackbox] must fulfil, and the placeholders of its command."""

from __future__ import annotations

import difflib
import re

from evald.config import BlackBox

PLACEHOLDERS = ("dir", "step", "run", "revision", "output", "output_dir", "record_id")
#: ``{name}``; doubled braces stand for themselves.
_BRACED = re.compile(r"\{(\{[a-z_]+\})\}|\{([a-z_]+)\}")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_black_box(config: BlackBox) -> list[str]:
    """Return one sentence for each fault that no single field can know."""
    problems = []
    if (config.class_ is None) == (config.command is None):
        both = "got both" if config.command is not None else "got none"
        problems.append(f"blackbox: exactly one of class and command must be set, {both}")
    if config.class_ is not None and not _CLASS.fullmatch(config.class_):
        problems.append(
            f'blackbox.class: must be "module:Class", such as "my_evals:Judge", got '
            f"{config.class_!r}"
        )
    if config.command is not None:
        problems += _check_command(config)
    return problems


def _check_command(config: BlackBox) -> list[str]:
    problems = []
    command = config.command or []
    if not command or not command[0]:
        problems.append("blackbox.command: must name a program, got nothing")
    unknown = [m[2] for word in command for m in _BRACED.finditer(word) if m[2]]
    for name in dict.fromkeys(unknown):
        if name not in PLACEHOLDERS:
            near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.5)
            hint = f"did you mean {{{near[0]}}}? " if near else ""
            problems.append(
                f"blackbox.command: unknown placeholder {{{name}}}; {hint}known are "
                f"{', '.join(f'{{{p}}}' for p in PLACEHOLDERS)}; write {{{{{name}}}}} to pass it on"
            )
    used = {m[2] for word in command for m in _BRACED.finditer(word)}
    if command and not used & {"output", "output_dir"}:
        problems.append(
            "blackbox.command: has neither {output} nor {output_dir}, so its results could not be "
            "found; pass it the file to write"
        )
    if config.config or config.python is not None:
        problems.append(
            "blackbox: config and python belong to class; put arguments into the command itself"
        )
    return problems


def fill_in(command: list[str], values: dict[str, str]) -> list[str]:
    """Replace the placeholders of a checked command."""

    def replace(match: re.Match[str]) -> str:
        return match[1] or values[match[2]]

    return [_BRACED.sub(replace, word) for word in command]
