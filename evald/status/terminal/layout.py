"""What the status shows, from top to bottom, and what gives way where rows are few."""

from __future__ import annotations

import msgspec

from evald.status.terminal import node, points
from evald.status.terminal.source import Shown
from evald.status.terminal.text import Line, Painter


class _Section(msgspec.Struct):
    lines: list[Line]
    #: rows that it keeps in any case.
    least: int
    #: it gives way before others, and without a word.
    quiet: bool = False


def lines(shown: Shown, paint: Painter, *, rows: int | None = None) -> list[Line]:
    """Return the status as lines, in at most ``rows``; None: as many as it takes."""
    sections = _sections(shown, paint, brief=False)
    if rows is None:
        return [line for section in sections for line in section.lines]
    if _height(sections) > rows:
        sections = _sections(shown, paint, brief=True)
    _shorten(sections, _height(sections) - rows, paint)
    # space between them comes last, where there is room for all of it
    gap: list[Line] = [[]] if _height(sections) + len(sections) - 1 <= rows else []
    found = [line for section in sections for line in [*section.lines, *gap]]
    return found[: -len(gap) or None][:rows]


def _sections(shown: Shown, paint: Painter, *, brief: bool) -> list[_Section]:
    view = shown.view
    sections = [
        _Section(node.heading(view, paint), 2),
        _Section(node.engines(view, paint, brief=brief), 3),
        _Section(points.running(view, paint), 4),
        _Section(points.queued(view, paint), 1),
        _Section(points.last(shown.points, view.time, paint), 4),
        _Section(node.alerts(shown.alerts, view.time, paint), 3),
        _Section(node.room(view, paint), 2, quiet=True),
    ]
    return [section for section in sections if section.lines]


def _height(sections: list[_Section]) -> int:
    return sum(len(section.lines) for section in sections)


def _shorten(sections: list[_Section], too_many: int, paint: Painter) -> None:
    """Take rows from quiet sections, then from whichever has the most to give, one by one."""
    kept = [len(section.lines) for section in sections]
    while too_many > 0:
        give = [
            (n > section.least, section.quiet, n - section.least, number)
            for number, (n, section) in enumerate(zip(kept, sections, strict=True))
        ]
        can, _, _, number = max(give)
        if not can:
            break
        kept[number] -= 1
        too_many -= 1
    for section, n in zip(sections, kept, strict=True):
        hidden = len(section.lines) - n
        section.lines = section.lines[:n]
        if hidden and n > 1 and not section.quiet:
            words = f"  {paint.glyphs.more} {hidden + 1} more rows"
            section.lines[-1] = [paint.text(words, "dim")]
