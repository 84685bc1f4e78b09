"""Tables of samples for loggers: the first few of a set, and those whose score has changed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, NamedTuple

import msgspec
import structlog

from evald.errors import EvaldError
from evald.point import Outcome
from evald.results.samples import SampleRecord
from evald.results.sinks.rows import Row

#: opens the samples of a set of the point with a record id; raises FileNotFoundError, OSError.
OpenSamples = Callable[[str, str], AbstractContextManager[BinaryIO]]

log = structlog.get_logger(__name__)

_MAX_CHARS = 4000


class Table(NamedTuple):
    """A table for people."""

    columns: list[str]
    rows: list[list[Any]]


class _Head(msgspec.Struct, frozen=True, gc=False):
    question: str
    sample: int
    score: float | None = None


class _Found(NamedTuple):
    offset: int
    score: float | None


class SampleTables:
    """Makes the tables of points that were measured; ``n`` rows at most in each. Blocking."""

    def __init__(self, open_samples: OpenSamples, n: int) -> None:
        self._open = open_samples
        self._n = n
        self._has_said = False

    def of(self, row: Row) -> dict[str, Table]:
        """Return tables by name: ``eval/{set}/samples``, and ``eval/{set}/flips``.

        Flips are the samples that the point before had, too, with another score: the largest
        changes first. Samples that are no longer there make no table.
        """
        if not row.ended or row.outcome == Outcome.SKIPPED:
            return {}
        try:
            return self._of(row)
        except (OSError, EvaldError, msgspec.DecodeError) as error:
            if not self._has_said:  # the curve goes on without its tables
                self._has_said = True
                log.warning("samples_unreadable", point=row.record_id, detail=str(error))
            return {}

    def _of(self, row: Row) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for name in row.sets:
            now = self._newest(row.record_id, name)
            if not now:
                continue
            first = self._read(row.record_id, name, list(now.values())[: self._n])
            tables[f"eval/{name}/samples"] = _samples(first)
            before = self._newest(row.previous, name) if row.previous else {}
            if before:
                tables[f"eval/{name}/flips"] = self._flips(row, name, before, now)
        return tables

    def _flips(
        self,
        row: Row,
        name: str,
        before: dict[tuple[str, int], _Found],
        now: dict[tuple[str, int], _Found],
    ) -> Table:
        changed = heapq.nlargest(
            self._n,
            ((abs(change), key) for key in now if (change := _change(before.get(key), now[key]))),
        )
        keys = [key for _, key in changed]
        old = self._read(row.previous, name, [before[key] for key in keys])
        new = self._read(row.record_id, name, [now[key] for key in keys])
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
            for b, a in zip(old, new, strict=True)
        ]
        columns = ["question", "sample", "score before", "score", "response before", "response"]
        return Table([*columns, "reference", "reason"], rows)

    def _newest(self, record_id: str, name: str) -> dict[tuple[str, int], _Found]:
        """Return where the samples lie; of one that was asked again, the newest."""
        found: dict[tuple[str, int], _Found] = {}
        offset = 0
        try:
            with self._open(record_id, name) as file:
                for line in file:
                    try:
                        head = _heads.decode(line)
                    except (msgspec.DecodeError, RecursionError):
                        pass  # torn: it has no place in a table
                    else:
                        found[head.question, head.sample] = _Found(offset, head.score)
                    offset += len(line)
        except FileNotFoundError:
            return {}
        return found

    def _read(self, record_id: str, name: str, wanted: Iterable[_Found]) -> list[SampleRecord]:
        offsets = [one.offset for one in wanted]
        if not offsets:
            return []
        missing, lines = set(offsets), {}
        offset = 0
        with self._open(record_id, name) as file:
            for line in file:
                if offset in missing:
                    lines[offset] = _records.decode(line)
                    missing.discard(offset)
                    if not missing:
                        break
                offset += len(line)
        return [lines[offset] for offset in offsets]


def _samples(records: Iterable[SampleRecord]) -> Table:
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


def _change(before: _Found | None, now: _Found) -> float:
    if before is None or before.score is None or now.score is None:
        return 0.0
    return now.score - before.score


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    # half a surrogate pair, which a cut answer may end in, is no text for a logger
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


_heads: msgspec.json.Decoder[_Head] = msgspec.json.Decoder(_Head)
_records: msgspec.json.Decoder[SampleRecord] = msgspec.json.Decoder(SampleRecord)
