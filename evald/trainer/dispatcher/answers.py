"""The results that the ledger has: the same bytes of a step are answered with the record there."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.point import Outcome
from evald.trainer.dispatcher.inflight import Name


class Answers:
    """Terminal records of points that were measured, by name and digest, small in memory."""

    def __init__(self) -> None:
        self._records: dict[Name, dict[str, bytes]] = {}

    def add(self, name: Name, record: dict[str, Any]) -> None:
        """Take in a terminal record; that of a skipped point is no answer."""
        if record["outcome"] != Outcome.SKIPPED:
            of_name = self._records.setdefault(name, {})
            digest = record.get("digest") or ""
            of_name.pop(digest, None)  # the newest is the last one
            of_name[digest] = msgspec.json.encode(record)

    def of(self, name: Name, digest: str) -> dict[str, Any] | None:
        """Return the newest record of these bytes."""
        return _decoded(self._records.get(name, {}).get(digest))

    def newest(self, name: Name) -> dict[str, Any] | None:
        """Return the newest record of any bytes of the point."""
        return _decoded(next(reversed(self._records.get(name, {}).values()), None))

    def clear(self) -> None:
        """Begin again: another ledger is read."""
        self._records.clear()


def _decoded(line: bytes | None) -> dict[str, Any] | None:
    return None if line is None else msgspec.json.decode(line, type=dict[str, Any])
