"""The rows that status is made of; all text goes through one place that makes it harmless."""

from __future__ import annotations

import textwrap

from evald.status.terminal.text import UNICODE, Glyphs, Line, Span, cut_middle, left, right, width

#: columns without a bound from a terminal.
WIDTH = 80


class Painter:
    """Makes spans of cleaned text, for rows of ``columns``."""

    def __init__(self, columns: int = WIDTH, glyphs: Glyphs = UNICODE) -> None:
        self.columns = columns
        self.glyphs = glyphs

    def text(self, text: str, style: str = "") -> Span:
        """Return a text as long as it is."""
        return Span(self.glyphs.clean(text), style)

    def left(self, text: str, columns: int, style: str = "") -> Span:
        """Return a cell; a name that is too long loses its middle."""
        return Span(left(self._fit(text, columns), columns), style)

    def right(self, text: str, columns: int, style: str = "") -> Span:
        """Return a cell with its text at the right."""
        return Span(right(self._fit(text, columns), columns), style)

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
            self.columns - indent,
            max_lines=most,
            placeholder=self.glyphs.more,
            break_on_hyphens=False,  # of names and paths
        )
        return [[Span(" " * indent + row, style)] for row in rows]

    def _fit(self, text: str, columns: int) -> str:
        return cut_middle(self.glyphs.clean(text), columns, self.glyphs.more)
