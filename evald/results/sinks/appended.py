"""A file that grows by whole deliveries: each is in it once, whatever kills the writer."""

from __future__ import annotations

import os
import time
from pathlib import Path

from evald.errors import EvaldError
from evald.results.sinks.cursor import Cursor, Mark
from evald.results.sinks.place import Place
from evald.results.sinks.rows import Row


class AppendedFile:
    """Appends to ``DIRECTORY/NAME``, with its cursor beside it.

    The cursor names the size of the file that has exactly what was delivered. What lies behind
    that size was written by a life that died before it could say so: it is cut off, and comes
    again. Every method raises SinkFault for what may pass (disk full), else EvaldError.
    """

    def __init__(self, directory: Path, name: str, *, cursor_name: str) -> None:
        self._directory = directory
        self._path = directory / name
        self._place = Place(directory / cursor_name)
        self._cursor: Cursor | None = None
        self._descriptor = -1
        #: what is not yet in the file: bytes, and the rows that they are of.
        self._content = bytearray()
        self._first: Mark | None = None
        self._last: Mark | None = None

    def cursor(self) -> Cursor | None:
        """Return how far an earlier life got, and keep others from writing."""
        try:
            self._place.hold()
            found = self._place.load()
            if found is not None and self._path.stat().st_size >= found.size:
                self._cursor = found
        except FileNotFoundError:
            pass  # somebody has deleted what was delivered
        except OSError as error:
            raise self._place.fault(error) from error
        return self._cursor

    def forget(self) -> None:
        """Begin with an empty file; what is there goes to ``earlier-TIME/``."""
        try:
            if self._cursor is not None:
                aside = self._directory / f"earlier-{time.time_ns()}"
                aside.mkdir()
                self._path.rename(aside / self._path.name)
        except OSError as error:
            raise self._place.fault(error) from error
        self._cursor = None

    def add(self, row: Row, content: bytes) -> None:
        """Take in what a row adds to the file."""
        self._last = Mark.of(row)
        self._first = self._first or self._last
        self._content += content

    def flush(self) -> None:
        """Write what was taken in, then the cursor; after a fault it can be called again."""
        if self._first is None or self._last is None:
            return
        try:
            self._write(self._first, self._last)
        except OSError as error:
            raise self._place.fault(error) from error
        self._content.clear()
        self._first = self._last = None

    def _write(self, first: Mark, last: Mark) -> None:
        if self._descriptor < 0:
            self._place.hold()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        size = 0
        if self._cursor is not None:
            first, size = self._cursor.first, self._cursor.size
        self._check_there(size)
        os.ftruncate(self._descriptor, size)  # what a fault, or another life, has left
        rest = bytes(self._content)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        os.fdatasync(self._descriptor)
        cursor = Cursor(first, last, size=size + len(self._content))
        self._place.store(cursor)
        self._cursor = cursor

    def _check_there(self, size: int) -> None:
        """Raise EvaldError when what was delivered is gone: nobody would see what follows."""
        mine = os.fstat(self._descriptor)
        try:
            is_there = os.path.samestat(mine, self._path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there or mine.st_size < size:
            raise EvaldError(
                f"cannot go on with {self._path}: somebody has deleted or replaced it; run the "
                "command again: everything is then delivered anew"
            )

    def close(self) -> None:
        """Flush and let go."""
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._place.release()
