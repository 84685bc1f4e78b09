"""Looking twice at what nobody marks, or what somebody else deletes.

A checkpoint that its trainer deletes loses its files one by one, and one that is written anew mixes
old and new ones. So such a directory counts once it has stood still for a while.
"""

from __future__ import annotations

import time
from collections.abc import Container
from pathlib import Path

from evald.staging.candidate import Candidate

#: in scan intervals: the next regular scan is late enough for a snapshot ...
_CALM = 0.5
#: ... and a fault is told only when several have seen the same (a large file is deleted slowly).
_CALM_WITH_FAULT = 4.5


class Settling:
    """Remembers since when each directory has been as it is."""

    def __init__(self, scan_interval_s: float) -> None:
        self._interval_s = scan_interval_s
        self._since: dict[Path, tuple[str, float]] = {}
        #: directories that were asked for and had not settled: a run is not over before they have.
        self.restless: set[Path] = set()

    def has_settled(self, candidate: Candidate) -> bool:
        """Tell whether the candidate's directory has stood still long enough for what it is."""
        now = time.monotonic()
        known, since = self._since.get(candidate.directory, ("", now))
        if known != candidate.fingerprint:
            since = now
        self._since[candidate.directory] = (candidate.fingerprint, since)
        calm = _CALM_WITH_FAULT if candidate.fault else _CALM
        if now - since < calm * self._interval_s:
            self.restless.add(candidate.directory)
            return False
        self.restless.discard(candidate.directory)
        return True

    def keep(self, present: Container[Path]) -> None:
        """Forget directories that are not ``present`` any more."""
        self._since = {path: seen for path, seen in self._since.items() if path in present}
        self.restless = {path for path in self.restless if path in present}
