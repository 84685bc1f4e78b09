"""How far a reader got in a ledger, told to its next life, and whether that is the same ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evald.errors import EvaldError
from evald.results.sinks.rows import Row


class Mark(msgspec.Struct, frozen=True):
    """Knows a row again: another ledger has other times."""

    seq: int
    record_id: str
    time: float

    @classmethod
    def of(cls, row: Row) -> Mark:
        """Return the mark of a row."""
        return cls(row.seq, row.record_id, row.time)


class Cursor(msgspec.Struct, frozen=True):
    """The rows ``first`` to ``last`` of a run are delivered."""

    first: Mark
    last: Mark
    #: of the target with ``last`` in it: bytes of a file, commits of a W&B run.
    size: int = 0


def load(path: Path) -> Cursor | None:
    """Read a cursor; None if there is none.

    Raises OSError, and EvaldError for a file that is no cursor.
    """
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise EvaldError(
            f"cannot go on from {path}: {error}; delete it to deliver everything again"
        ) from error


def store(path: Path, cursor: Cursor) -> None:
    """Put a cursor in the place of the one before, whole or not at all; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(cursor) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


class Gate:
    """Tells rows that an earlier life has delivered from new ones.

    Rows are held back until it is clear that the ledger is the one that the cursor stands in: by
    the first row, or by the last one delivered.
    """

    def __init__(self, cursor: Cursor | None) -> None:
        self._cursor = cursor
        self._held: list[Row] = []
        self._is_same = False
        #: the cursor is of another ledger: all rows are new.
        self.is_other = False

    def sort(self, row: Row) -> Iterator[tuple[Row, bool]]:
        """Give the rows that are clear now, and whether they are known."""
        cursor = self._cursor
        if cursor is None or self.is_other:
            yield row, False
        elif self._is_same:
            yield row, row.seq <= cursor.last.seq
        else:
            self._held.append(row)
            if Mark.of(row) in {cursor.first, cursor.last}:
                self._is_same = True
                for held in self._held:
                    yield held, held.seq <= cursor.last.seq
                self._held = []

    def settle(self) -> Iterator[tuple[Row, bool]]:
        """Give what is held back: no more rows are there now."""
        if self._held:
            self.is_other = True
            for held in self._held:
                yield held, False
            self._held = []


_decoder: msgspec.json.Decoder[Cursor] = msgspec.json.Decoder(Cursor)
