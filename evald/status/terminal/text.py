"""Text in columns of a terminal: how wide it is, how it is cut, which characters may be used."""

from __future__ import annotations

import unicodedata
from typing import TextIO

import msgspec

from evald.text import escape

#: what an escape sequence selects (ECMA-48), by the names used here.
_SGR = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Glyphs(msgspec.Struct, frozen=True, kw_only=True):
    """The characters that are drawn with."""

    unicode: bool
    more: str
    full: str
    empty: str
    plus_minus: str
    up: str
    down: str
    delta: str

    def clean(self, text: str) -> str:
        """Return ``text`` so that it can only be seen: no control characters, nothing unknown."""
        text = escape(text)
        return text if self.unicode else text.encode("ascii", "backslashreplace").decode()


UNICODE = Glyphs(
    unicode=True, more="…", full="▆", empty="▁", plus_minus="±", up="▲", down="▼", delta="Δ"
)
ASCII = Glyphs(
    unicode=False, more="...", full="#", empty=".", plus_minus="+-", up="^", down="v", delta="d"
)


def glyphs_of(output: TextIO) -> Glyphs:
    """Return what can be drawn on ``output``."""
    return UNICODE if (output.encoding or "ascii").lower().startswith("utf") else ASCII


class Span(msgspec.Struct, frozen=True):
    """A piece of a line, clean, in one style: a name of ``_SGR``."""

    text: str
    style: str = ""


#: one row.
Line = list[Span]


def width(text: str) -> int:
    """Count the columns that clean text takes."""
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int, more: str) -> str:
    """Return ``text`` in at most ``columns``; what is too long ends in ``more``."""
    if width(text) <= columns:
        return text
    return _head(text, columns - width(more)) + _head(more, columns)


def cut_middle(text: str, columns: int, more: str) -> str:
    """Return ``text`` in at most ``columns``: of names both ends tell them apart."""
    if width(text) <= columns:
        return text
    room = columns - width(more)
    if room < 2:  # noqa: PLR2004 - no room for two ends
        return _head(text, columns)
    tail = _head(text[::-1], room // 2)[::-1]
    return _head(text, room - width(tail)) + more + tail


def _head(text: str, columns: int) -> str:
    taken = 0
    for number, character in enumerate(text):
        taken += _width(character)
        if taken > columns:
            return text[:number]
    return text


def left(text: str, columns: int) -> str:
    """Fill up with spaces on the right."""
    return text + " " * (columns - width(text))


def right(text: str, columns: int) -> str:
    """Fill up with spaces on the left."""
    return " " * (columns - width(text)) + text


def draw(line: Line, columns: int, glyphs: Glyphs, *, colour: bool) -> str:
    """Return a row in at most ``columns``, without spaces at its end."""
    pieces = list(line)
    while pieces and not pieces[-1].text.strip(" "):
        pieces.pop()
    if pieces:
        pieces[-1] = Span(pieces[-1].text.rstrip(" "), pieces[-1].style)
    if sum(width(span.text) for span in pieces) > columns:
        pieces = _cut_pieces(pieces, columns, glyphs.more)
    return "".join(_styled(span) if colour else span.text for span in pieces)


def _cut_pieces(pieces: Line, columns: int, more: str) -> Line:
    kept: Line = []
    room = columns
    for span in pieces:
        if width(span.text) >= room:
            # something stands behind it in any case
            return [*kept, Span(cut(span.text + " " * columns, room, more), span.style)]
        kept.append(span)
        room -= width(span.text)
    return kept


def _styled(span: Span) -> str:
    code = _SGR[span.style]
    return f"\x1b[{code}m{span.text}\x1b[0m" if code and span.text else span.text
