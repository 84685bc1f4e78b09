"""Rows as lines of JSON: one flat object each, as pandas reads them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from evald.results.sinks.appended import AppendedFile
from evald.results.sinks.cursor import Cursor
from evald.results.sinks.rows import Row


class JsonlSink:
    """Appends the rows of a run to ``DIRECTORY/RUN.jsonl``.

    A line has ``record_id``, ``run``, ``kind``, ``step``, ``revision``, ``time``, ``seq``,
    ``outcome`` and ``reason`` (empty for what is early), and the row's metrics by name; null: what
    was shown early stands no longer. Of several values of a metric at a step the last one counts.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._file = AppendedFile(directory, f"{run}.jsonl", cursor_name=f".{run}.cursor")
        self.target = str(directory / f"{run}.jsonl")

    def cursor(self) -> Cursor | None:
        """See Sink."""
        return self._file.cursor()

    def known(self, row: Row) -> None:
        """Pass by: a line depends on no other."""

    def forget(self) -> None:
        """See Sink."""
        self._file.forget()

    def take(self, row: Row) -> None:
        """See Sink."""
        self._file.add(row, msgspec.json.encode(_flat(row)) + b"\n")

    def flush(self) -> None:
        """See Sink."""
        self._file.flush()

    def close(self) -> None:
        """See Sink."""
        self._file.close()


def _flat(row: Row) -> dict[str, object]:
    own: dict[str, object] = {
        name: getattr(row, name)
        for name in ("record_id", "run", "kind", "step", "revision", "time", "seq")
    }
    own |= {"outcome": row.outcome, "reason": row.reason}
    metrics = {
        name: None if math.isnan(value) else value
        for name, value in row.metrics.items()
        if name not in own
    }
    return own | metrics
