"""The files of a ledger that has grown: closed ones, in order, beside the one that is written."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

#: so many digits that a directory listing is in order, too.
_DIGITS = 9
_SPAN = re.compile(r"([0-9]+)-([0-9]+)")


class Segment(msgspec.Struct, frozen=True, order=True):
    """A closed file of the ledger, with the ``seq`` of its first and last record."""

    first: int
    last: int
    path: Path


def segment_path(ledger: Path, first: int, last: int) -> Path:
    """Return the name that ``ledger`` gets once it is closed: ``results.FIRST-LAST.jsonl``."""
    span = f"{first:0{_DIGITS}}-{last:0{_DIGITS}}"
    return ledger.with_name(f"{ledger.stem}.{span}{ledger.suffix}")


def closed_segments(ledger: Path) -> list[Segment]:
    """Return the closed files beside ``ledger``, oldest first; raises OSError."""
    head, tail = f"{ledger.stem}.", ledger.suffix
    found = []
    try:
        names = [path.name for path in ledger.parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        if name.startswith(head) and name.endswith(tail):
            match = _SPAN.fullmatch(name[len(head) : len(name) - len(tail)])
            if match is not None:
                found.append(Segment(int(match[1]), int(match[2]), ledger.with_name(name)))
    return sorted(found)
