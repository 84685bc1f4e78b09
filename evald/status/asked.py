"""Numbers that a reader writes into a URL or a header."""

from __future__ import annotations


def natural(text: str, name: str) -> int:
    """Return a whole number from 0; raises ValueError, naming the argument."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"cannot use {name}={text!r}: it must be a whole number from 0")
    return int(text)


def seconds(text: str, name: str) -> float:
    """Return a number of seconds from 0; raises ValueError, naming the argument."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:  # also what is no number at all, "nan"
        raise ValueError(f"cannot use {name}={text!r}: it must be a number of seconds from 0")
    return number
