"""Tables of samples for loggers: the first few of a set, and those whose score has changed."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import msgspec
import structlog

from evald.errors import EvaldError
from evald.point import Outcome
from evald.results.sample_heads import Head, SampleHeads, read_heads, read_samples
from evald.results.samples import SampleRecord
from evald.results.sinks.rows import Row
from evald.results.sinks.stored import OpenSamples

log = structlog.get_logger(__name__)

_MAX_CHARS = 4000


class Table(NamedTuple):
    """A table for people."""

    columns: list[str]
    rows: list[list[Any]]


class SampleTables:
    """Makes the tables of points that were measured; ``n`` rows at most in each. Blocking."""

    def __init__(self, open_samples: OpenSamples, n: int) -> None:
        self._open = open_samples
        self._n = n
        self._has_said = False

    def of(self, row: Row) -> dict[str, Table]:
        """Return tables by name: ``eval/{set}/samples``, and ``eval/{set}/flips``.

        Flips are the samples that the point before had, too, with another score: the largest
        changes first; none where the set was measured otherwise then. Samples that are no longer
        there make no table.
        """
        if not row.ended or row.outcome == Outcome.SKIPPED:
            return {}
        try:
            return self._of(row)
        except (OSError, EvaldError) as error:
            if not self._has_said:  # the curve goes on without its tables
                self._has_said = True
                log.warning("samples_unreadable", point=row.record_id, detail=str(error))
            return {}

    def _of(self, row: Row) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for name in row.sets:
            now = self._heads(row.record_id, name)
            if not now.heads:
                continue
            first = self._read(row.record_id, name, now.heads[: self._n])
            tables[f"eval/{name}/samples"] = _samples(first)
            before = self._heads(row.previous, name) if row.previous else None
            if before is not None and before.config == now.config:
                tables[f"eval/{name}/flips"] = self._flips(row, name, before, now)
        return tables

    def _flips(self, row: Row, name: str, before: SampleHeads, now: SampleHeads) -> Table:
        old = {(head.question, head.sample): head for head in before.heads}
        pairs = [
            (then, head)
            for head in now.heads
            if (then := old.get((head.question, head.sample))) is not None
        ]
        changed = heapq.nlargest(
            self._n, [pair for pair in pairs if _change(*pair)], key=lambda pair: _change(*pair)
        )
        were = self._read(row.previous, name, [then for then, _ in changed])
        are = self._read(row.record_id, name, [head for _, head in changed])
        rows = [
            [
                a.question,
                a.sample,
                b.score,
                a.score,
                _text(b.response),
                _text(a.response),
                _text(a.reference),
                _text(a.grader_reason),
            ]
            for b, a in zip(were, are, strict=True)
        ]
        columns = ["question", "sample", "score before", "score", "response before", "response"]
        return Table([*columns, "reference", "reason"], rows)

    def _heads(self, record_id: str, name: str) -> SampleHeads:
        try:
            with self._open(record_id, name) as file:
                return read_heads(file)
        except FileNotFoundError:
            return SampleHeads("", [])

    def _read(self, record_id: str, name: str, heads: list[Head]) -> list[SampleRecord]:
        if not heads:
            return []
        with self._open(record_id, name) as file:
            return read_samples(file, heads)


def _samples(records: list[SampleRecord]) -> Table:
    columns = ["question", "sample", "score", "status", "truncated", "response", "reference"]
    rows = [
        [
            one.question,
            one.sample,
            one.score,
            one.status,
            one.truncated,
            _text(one.response),
            _text(one.reference),
            _text(one.grader_reason),
        ]
        for one in records
    ]
    return Table([*columns, "reason"], rows)


def _change(before: Head, now: Head) -> float:
    if before.score is None or now.score is None:
        return 0.0
    return abs(now.score - before.score)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    # half a surrogate pair, which a cut answer may end in, is no text for a logger
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."
