"""Removing the trainer's files once what they say is in the ledger, and trying that again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evald.point import PointKey
from evald.results.index import PointIndex
from evald.staging.completeness import Identity
from evald.staging.retention import Retention


class Consuming:
    """Removes requests, and whatever ``retention`` could not remove at once.

    ``heard``: the words in the root that were read, as they were; another file of a word's name is
    another word, and stays.
    """

    def __init__(
        self, retention: Retention, index: PointIndex, heard: Mapping[Path, Identity]
    ) -> None:
        self._retention = retention
        self._index = index
        self._heard = heard
        self._requests: dict[Path, tuple[PointKey, Identity]] = {}
        #: could not be removed at once.
        self._left: dict[Path, Identity] = {}

    def add(self, request: Path, key: PointKey, identity: Identity) -> None:
        """Remove a request once its point is in the ledger."""
        self._requests[request] = key, identity

    def look(self) -> None:
        """Take in what could not be removed; before ``heard`` follows a new scan."""
        for path in self._retention.take_unconsumed() & self._heard.keys():
            self._left[path] = self._heard[path]

    async def run(self) -> None:
        """Remove what can be removed now."""
        left, self._left = self._left, {}
        for path, identity in left.items():
            if self._heard.get(path) == identity:  # else it is a new word
                await self._retention.consume(path, again=True)
        for path, (key, identity) in list(self._requests.items()):
            if self._index.get(key) is None:
                continue
            del self._requests[path]
            if self._heard.get(path) == identity:  # else it is a new request, unread so far
                await self._retention.consume(path)
