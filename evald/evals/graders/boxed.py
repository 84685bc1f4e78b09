r"""The content of the last ``\boxed{...}``: what ``boxed_<grader>`` hands to the grader inside."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def last_boxed(response: str) -> str | None:
    r"""Content of the ``\boxed{...}`` that opens last among those whose braces balance.

    One pass with a stack: no response can make it slow. ``\{`` and ``\}`` do not count as braces.
    """
    stack: list[tuple[bool, int, int]] = []
    best: tuple[int, int, int] | None = None
    for token in _TOKENS.finditer(response):
        text = token.group()
        if text == "}":
            if stack:
                is_box, start, inside = stack.pop()
                if is_box and (best is None or start > best[0]):
                    best = (start, inside, token.start())
        elif not text.startswith(("\\{", "\\}")):
            stack.append((text != "{", token.start(), token.end()))
    return None if best is None else response[best[1] : best[2]]
