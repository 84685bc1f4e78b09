"""Responses that end in repetition, as degenerate models write them."""

from __future__ import annotations

import zlib

#: a response is looked at when it is longer than this, and only its end is.
_CHARS = 10_000
_RATIO = 10.0


def repeats(response: str) -> bool:
    """Tell whether a long response ends in repetition.

    That is so when zlib makes its last 10,000 characters more than ten times smaller.
    """
    if len(response) <= _CHARS:
        return False
    tail = response[-_CHARS:].encode("utf-8", "replace")
    return len(tail) / len(zlib.compress(tail)) > _RATIO
