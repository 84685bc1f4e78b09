"""``python -m evald.evals.parquet_rows FILE START STOP``: rows of a Parquet file as JSON lines.

A process of its own, as pyarrow brings numpy along. Standard output: the number of the first row,
then one row a line; START and STOP are those of Python's slice, empty for none. On a fault the
exit code is 1, and the last line of standard error is the sentence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

#: rows that are in memory as Python objects at a time.
_BATCH_ROWS = 256


def write_rows(path: str, wanted: slice, out: BinaryIO) -> None:
    """Write the rows of ``path`` that a slice takes; raises ValueError with a sentence."""
    try:
        import pyarrow as pa  # noqa: PLC0415 (an extra)
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(
            f"reading Parquet needs pyarrow ({error}); install evald with its extra: evald[parquet]"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            start, stop, _ = wanted.indices(file.metadata.num_rows)
            out.write(b"%d\n" % (start + 1))
            for number, row in enumerate(_rows(file, start, stop), start=start + 1):
                try:
                    out.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
                except (TypeError, ValueError) as error:
                    raise ValueError(f"row {number} cannot be JSON: {error}") from error
    except pa.ArrowException as error:
        raise ValueError(f"it cannot be read as Parquet: {_first_line(error)}") from error


def _rows(file: Any, start: int, stop: int) -> Iterator[dict[str, Any]]:
    position = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        if position >= stop:
            return
        first, last = max(start - position, 0), max(min(stop - position, len(batch)), 0)
        if first < last:
            for row in batch.slice(first, last - first).to_pylist():
                yield {name: without_gaps(value) for name, value in row.items()}
        position += len(batch)


def without_gaps(value: Any) -> Any:
    """Leave out what a nested value does not have.

    Columns give all their structs the same fields, so that a message without ``tool_calls`` has
    them as null, which chat templates would print or take for given.
    """
    if isinstance(value, dict):
        return {name: without_gaps(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_gaps(one) for one in value]
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def main() -> int:
    """Convert one file."""
    path, *bounds = sys.argv[1:]
    start, stop = (int(bound) if bound else None for bound in bounds)
    try:
        write_rows(path, slice(start, stop), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # nobody wants more; nor may the interpreter try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{_first_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
