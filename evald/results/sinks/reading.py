"""A ledger read as rows: each run's own, those of an earlier life told from new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import structlog

from evald.results.records import AnyRecord, Newer, RunEnd, decode_any
from evald.results.sinks.cursor import Cursor, Gate
from evald.results.sinks.rows import Row, Rows
from evald.results.sinks.source import Source
from evald.staging.manifest import RUN_NAME

log = structlog.get_logger(__name__)


class Reading:
    """Reads the rows of a source, from its start.

    ``run``: only this one's; None: all runs'. ``cursor_of`` is asked once for each run: how far an
    earlier life got. ``on_other`` is told when that was in another ledger, before the first row.
    When the source begins again, ``on_restart`` is called, and all of that happens once more.
    """

    def __init__(
        self,
        source: Source,
        *,
        run: str | None,
        cursor_of: Callable[[str], Cursor | None],
        on_other: Callable[[str], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._run = run
        self._cursor_of = cursor_of
        self._on_other = on_other
        self._on_restart = on_restart
        self._restarts = source.restarts
        self._gates: dict[str, Gate] = {}
        self._rows: dict[str, Rows] = {}
        self._has_said_broken = False
        #: runs whose trainer has said that they are over, since the last call of ``new``.
        self.over: list[str] = []

    def new(self) -> Iterator[list[tuple[Row, bool]]]:
        """Give what is there now and was not given before; whether it is known to an earlier life.

        Raises OSError, and EvaldError, as the source does.
        """
        self.over.clear()
        for lines in self._source.batches():
            if self._source.restarts != self._restarts:
                self._restarts = self._source.restarts
                self._gates.clear()
                self._rows.clear()
                self._on_restart()
            yield [pair for record in self._decode(lines) for pair in self._of(record)]
        if not self._source.fault:
            yield [pair for run, gate in self._gates.items() for pair in self._sort(run, gate)]

    def _of(self, record: AnyRecord) -> Iterator[tuple[Row, bool]]:
        run = record.run
        if self._run is not None and run != self._run:
            return
        if isinstance(record, RunEnd):
            self.over.append(run)
            return
        row = self._rows.setdefault(run, Rows()).take(record)
        if row is None:
            return
        if run not in self._gates:
            self._gates[run] = Gate(self._cursor_of(run))
        yield from self._sort(run, self._gates[run], row)

    def _sort(self, run: str, gate: Gate, row: Row | None = None) -> Iterator[tuple[Row, bool]]:
        was_other = gate.is_other
        clear = list(gate.settle() if row is None else gate.sort(row))
        if gate.is_other and not was_other:
            log.warning("sink_ledger_changed", run=run, ledger=self._source.name)
            self._on_other(run)
        yield from clear

    def _decode(self, lines: list[bytes]) -> Iterator[AnyRecord]:
        for line in lines:
            try:
                record = decode_any(line)
                if not (isinstance(record, Newer) or RUN_NAME.fullmatch(record.run)):
                    # it becomes a file's name
                    raise msgspec.ValidationError(f"{record.run!r} is no run id")
            except msgspec.DecodeError as error:
                if not self._has_said_broken:  # a ledger may have many of them
                    self._has_said_broken = True
                    log.warning("record_unreadable", ledger=self._source.name, error=str(error))
                continue
            if not isinstance(record, Newer):
                yield record
