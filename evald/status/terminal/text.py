"""Text in rows and columns of a terminal: made harmless, cut, filled up, and drawn."""

from __future__ import annotations

import textwrap
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
#: columns without a bound from a terminal.
WIDTH = 80


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


class Painter:
    """Makes spans of cleaned text, for rows of ``columns``: all text of others goes through it."""

    def __init__(self, columns: int = WIDTH, glyphs: Glyphs = UNICODE) -> None:
        self.columns = columns
        self.glyphs = glyphs

    def text(self, text: str, style: str = "") -> Span:
        """Return a text as long as it is."""
        return Span(self.glyphs.clean(text), style)

    def left(self, text: str, columns: int, style: str = "") -> Span:
        """Return a cell; a name that is too long loses its middle."""
        fitting = self._fit(text, columns)
        return Span(fitting + " " * (columns - width(fitting)), style)

    def right(self, text: str, columns: int, style: str = "") -> Span:
        """Return a cell with its text at the right."""
        fitting = self._fit(text, columns)
        return Span(" " * (columns - width(fitting)) + fitting, style)

    def name_width(self, names: list[str], least: int, most: int) -> int:
        """Return the columns for the longest of ``names``, within bounds."""
        return max(least, min(most, max((width(self.glyphs.clean(n)) for n in names), default=0)))

    def bar(self, share: float, columns: int) -> list[Span]:
        """Return a progress bar; full only when all is done, and never empty once begun."""
        n_full = min(columns - 1, max(1, round(share * columns))) if 0 < share < 1 else 0
        n_full = columns if share >= 1 else n_full
        full, empty = self.glyphs.full * n_full, self.glyphs.empty * (columns - n_full)
        return [Span(full, "cyan"), Span(empty, "dim")]

    def sentence(self, text: str, style: str = "", *, indent: int = 0, most: int) -> list[Line]:
        """Return a sentence on rows of its own, at most ``most``."""
        rows = textwrap.wrap(
            self.glyphs.clean(text),
            max(self.columns - indent, len(self.glyphs.more)),
            max_lines=most,
            placeholder=self.glyphs.more,
            break_on_hyphens=False,  # of names and paths
        )
        return [[Span(" " * indent + row, style)] for row in rows]

    def _fit(self, text: str, columns: int) -> str:
        return cut_middle(self.glyphs.clean(text), columns, self.glyphs.more)


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
