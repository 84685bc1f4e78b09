"""``for row in follow(...)``: results for a logger of one's own."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

from evald.results.sinks import cursor as cursors
from evald.results.sinks.cursor import Cursor, Mark
from evald.results.sinks.delivery import POLL_S
from evald.results.sinks.reading import Reading
from evald.results.sinks.rows import Row
from evald.results.sinks.source import open_source


def follow(
    results: str | os.PathLike[str],
    *,
    cursor: str | os.PathLike[str] | None = None,
    run: str | None = None,
    once: bool = False,
    token_file: str | None = None,
    poll_s: float = POLL_S,
) -> Generator[Row, None, None]:
    """Yield the rows of a ledger as they come, for ever, or with ``once`` those that are there.

        for row in follow("/var/lib/evald/run", cursor="my-logger"):
            logger.log({"eval/step": row.step, **row.metrics})

    ``results``: what ``evald tail`` takes: results directory, ledger, config, or a daemon's URL.
    ``cursor``: the next life goes on where this one stopped; kept in ``CURSOR.RUN`` for each run.
    A row is done once the next one is asked for: the one in whose middle a life ends comes again.
    Metrics that were given early come once: the terminal record's row has what was missing.

    Raises OSError, ConfigError or EvaldError for what cannot be read. A daemon that does not answer
    is waited for; with ``once`` it gives nothing.
    """
    source = open_source(os.fspath(results), token_file=token_file)
    found: dict[str, Cursor | None] = {}

    def load(name: str) -> Cursor | None:
        found[name] = None if cursor is None else cursors.load(_path(cursor, name))
        return found[name]

    reading = Reading(
        source, run=run, cursor_of=load, on_other=lambda name: found.update({name: None})
    )
    try:
        while True:
            for pairs in reading.new():
                for row, is_known in pairs:
                    if is_known:
                        continue
                    yield row
                    if cursor is not None:
                        before, mark = found[row.run], Mark.of(row)
                        now = Cursor(before.first if before else mark, mark)
                        cursors.store(_path(cursor, row.run), now)
                        found[row.run] = now
            if once:
                return
            time.sleep(poll_s)
    finally:
        source.close()


def _path(cursor: str | os.PathLike[str], run: str) -> Path:
    return Path(f"{os.fspath(cursor)}.{run}")
