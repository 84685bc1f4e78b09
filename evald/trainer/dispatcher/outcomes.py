"""What a dispatcher's calls return."""

from __future__ import annotations

from typing import Literal

import msgspec


class Dispatched(msgspec.Struct, frozen=True):
    """What became of a call; the same on every rank.

    ``not_due``: nothing was to be done. ``dry_run``: it would have been due. ``known``: the step
    has its point already. ``published``: a snapshot is in the root, or on its way there.
    ``requested``: evald was asked for the point. ``skipped``: it has a ``reason``, and ``detail``
    is one sentence for people.
    """

    action: Literal["not_due", "dry_run", "known", "published", "requested", "skipped"]
    step: int
    reason: str = ""
    detail: str = ""


class Export(msgspec.Struct, frozen=True):
    """A decision: every rank takes part in the export now."""

    #: for the manifest.
    run: str | None = None
    #: an estimate; 0: nothing tells.
    size_bytes: int = 0


class Drained(msgspec.Struct, frozen=True):
    """True when every point has its terminal record; else what is ``missing``, and why."""

    missing: tuple[str, ...] = ()
    #: one sentence; empty when nothing is missing.
    detail: str = ""

    def __bool__(self) -> bool:
        return not self.detail


def counted(points: int, one: str, several: str) -> str:
    """Return "1 point is late" or "2 points are late" for ("is late", "are late")."""
    return f"1 point {one}" if points == 1 else f"{points} points {several}"
