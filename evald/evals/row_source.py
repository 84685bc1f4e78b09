"""The rows of a data file, one after another: JSON lines or Parquet, all of them or a slice."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

#: converting a Parquet file of a million rows takes a minute.
_PARQUET_TIMEOUT_S = 600.0

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
_LIKE_A_SLICE = re.compile(r".*@\[[^\]/]*\]?", re.DOTALL)
#: a slice without its @, which is a file's name.
_NEARLY_A_SLICE = re.compile(r"(?P<path>.+)(?P<slice>\[-?\d*:-?\d*\])", re.DOTALL)
_BOM = b"\xef\xbb\xbf"


class Unreadable(Exception):
    """The file as a whole cannot be read; the text says why, without naming it."""


class RawRow(msgspec.Struct, frozen=True):
    """One row as JSON."""

    #: from 1, in the whole file.
    number: int
    #: "line 7" or "row 7": where a person finds it.
    place: str
    content: bytes


class RowSource:
    """The rows that ``path`` names; iterate once, then ``digest`` tells what they were.

    ``path`` is a JSONL file, or a Parquet file (by its name's end), with ``@[a:b]`` behind it for
    some of its rows: Python's slice, negative numbers from the end. Blank lines are no rows.
    Blocking, and never all of the file in memory; iteration raises Unreadable.
    """

    def __init__(self, path: str) -> None:
        """Take a path apart; raises Unreadable for a slice that is none."""
        found = _SLICE.fullmatch(path)
        if found is None and _LIKE_A_SLICE.fullmatch(path):
            raise Unreadable("what stands behind @ is no slice; write FILE@[a:b], such as @[0:100]")
        self.path = Path(path if found is None else found["path"])
        self._slice = slice(None)
        if found is not None:
            start, stop = (int(found[key]) if found[key] else None for key in ("start", "stop"))
            self._slice = slice(start, stop)
        self._sliced = found is not None
        self._hash = xxhash.xxh3_128()

    @property
    def is_parquet(self) -> bool:
        """Whether the file is read as Parquet."""
        return self.path.suffix == ".parquet"

    @property
    def digest(self) -> str:
        """Hex, over the rows that were read: another one when any of them, or its number, is."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[RawRow]:
        """Give the rows in order."""
        try:
            yield from self._parquet() if self.is_parquet else self._json_lines()
        except OSError as error:
            nearly = _NEARLY_A_SLICE.fullmatch(str(self.path))
            if nearly and isinstance(error, FileNotFoundError):
                raise Unreadable(
                    f"{error.strerror}; for some rows of a file write "
                    f"{nearly['path']}@{nearly['slice']}"
                ) from error
            what = "Parquet" if self.is_parquet else "JSONL"
            raise Unreadable(f"{error.strerror}; set path to a {what} file") from error

    def _json_lines(self) -> Iterator[RawRow]:
        start, stop = self._slice.start or 0, self._slice.stop
        if start < 0 or (stop or 0) < 0:
            start, stop, _ = self._slice.indices(sum(bool(line.strip()) for line in self._lines()))
        number = 0
        for line_number, line in enumerate(self._lines(), start=1):
            if not self._sliced:
                self._hash.update(line)
            elif stop is not None and number >= stop:
                break
            content = line.strip()
            if not content:
                continue
            number += 1
            if number > start:
                if self._sliced:
                    self._hash.update(b"%d %s\n" % (number, content))
                yield RawRow(number, f"line {line_number}", content)

    def _lines(self) -> Iterator[bytes]:
        with self._open() as file:
            # some editors write a byte order mark, which no JSON parser takes
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            yield from file

    def _open(self) -> BinaryIO:
        if self.path.is_fifo():  # it might never be opened, and gives its rows only once
            raise Unreadable("it is a pipe; write the rows into a file")
        return self.path.open("rb")

    def _parquet(self) -> Iterator[RawRow]:
        """Let a process of its own convert the rows: pyarrow has no place in the daemon."""
        self._open().close()
        bounds = ["" if end is None else str(end) for end in (self._slice.start, self._slice.stop)]
        words = [sys.executable, "-P", "-m", "evald.evals.parquet_rows", str(self.path), *bounds]
        with (
            tempfile.TemporaryFile() as complaints,
            subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints
            ) as process,
        ):
            timer = threading.Timer(_PARQUET_TIMEOUT_S, process.kill)
            timer.start()
            try:
                lines = iter(process.stdout or ())
                first = int(next(lines, b"1"))
                for number, line in enumerate(lines, start=first):
                    self._hash.update(b"%d %s" % (number, line) if self._sliced else line)
                    yield RawRow(number, f"row {number}", line)
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
            if code:
                complaints.seek(0)
                last = complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise Unreadable(last or f"the process that reads it ended with exit code {code}")
