"""Where a job's snapshots go, and which run they are of by that place alone."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec

from evald.status.view import StatusView


class Place(msgspec.Struct, frozen=True):
    """The daemon's staging root, or a run's folder in it."""

    #: None: nobody knows (a carrier of the user's own).
    path: Path | None
    #: whether it is seen from here under this path.
    here: bool = True

    def run(self, status: StatusView) -> str | None:
        """Return the run of what names none itself; None: the place does not tell."""
        if self.path is None:
            return None
        if self.here and (self.path / ".evald").exists():
            return status.run
        if self.here and (self.path.parent / ".evald").exists():
            return self.path.name
        if status.staging is None:
            return None
        served, mine = PurePosixPath(status.staging.root), PurePosixPath(self.path)
        if mine.parts[:1] == ("~",):  # a far home
            mine = mine.relative_to("~")
        if _ends_with(served, mine):
            return status.run
        return mine.name if _ends_with(served, mine.parent) else None


def far_place(destination: str) -> Place:
    """Return the place on another host that ``host:/path`` names; an IPv6 host has brackets."""
    head, _, path = destination.partition("]:") if "]:" in destination else ("", "", "")
    return Place(Path(path if head else destination.partition(":")[2]), here=False)


def _ends_with(whole: PurePosixPath, end: PurePosixPath) -> bool:
    if end.is_absolute():
        return whole == end
    return bool(end.parts) and whole.parts[-len(end.parts) :] == end.parts
