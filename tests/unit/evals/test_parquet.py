"""Parquet files: read by a process of its own, row by row what the same JSON lines would be."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals import row_source
from evald.evals.parquet_rows import without_gaps, write_rows
from evald.evals.row_source import RowSource
from evald.evals.sets import load_set

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "number"}}}}
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "hi"}], "label": "a", "tools": [TOOL], "m": {"d": 1}},
    {
        "prompt": [
            {"role": "user", "content": "sum"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "n": 2}]},
        ],
        "label": "b",
        "tools": None,
        "m": {"e": "x"},
    },
    {"prompt": [{"role": "user", "content": "bye"}], "label": "c", "tools": [], "m": None},
]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Write rows to a Parquet file and give the eval set that reads it."""

    def write(rows: list[dict[str, Any]], rows_of: str = "", **fields: Any) -> EvalSet:
        path = tmp_path / "toy.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        return msgspec.convert({"name": "toy", "path": f"{path}{rows_of}", **fields}, EvalSet)

    return write


def problem_of(eval_set: EvalSet) -> str:
    with pytest.raises(ConfigError) as caught:
        load_set(eval_set)
    (problem,) = caught.value.problems
    return problem.removeprefix(f"cannot read eval set 'toy': {eval_set.path}")


def test_messages_tools_and_metadata_are_what_they_were(make: Any) -> None:
    loaded = load_set(make(ROWS, tool_key="tools", metadata_key="m"))
    first, second, third = loaded.questions
    assert [q.id for q in loaded.questions] == ["1", "2", "3"]
    assert first.prompt == ROWS[0]["prompt"]  # without the null tool_calls of its column
    assert (first.tools, first.metadata) == ([TOOL], {"d": 1})
    call = {"role": "assistant", "tool_calls": [{"name": "f", "n": 2}]}
    assert second.prompt == [{"role": "user", "content": "sum"}, call]
    assert (second.tools, second.metadata, second.label) == ([], {"e": "x"}, "b")
    assert (third.tools, third.metadata) == ([], None)


def test_values_that_json_does_not_have_become_text(make: Any) -> None:
    row = {
        "prompt": "p",
        "label": Decimal("1.50"),
        "m": {"day": date(2024, 1, 2), "bytes": b"ab", "number": float("nan")},
    }
    (question,) = load_set(make([row], metadata_key="m")).questions
    assert question.label == "1.50"
    assert question.metadata == {"day": "2024-01-02", "bytes": "YWI=", "number": None}


@pytest.mark.parametrize(
    ("start", "stop", "numbers"),
    [
        (0, 2, [1, 2]),
        (1, None, [2, 3]),
        (None, 1, [1]),
        (-1, None, [3]),
        (None, -1, [1, 2]),
        (-2, -1, [2]),
        (None, None, [1, 2, 3]),
        (0, 99, [1, 2, 3]),
        (-99, 1, [1]),
        (2, 1, []),
        (7, 9, []),
    ],
)
def test_a_slice_takes_the_same_rows_of_both_kinds_of_file(
    make: Any, tmp_path: Path, start: int | None, stop: int | None, numbers: list[int]
) -> None:
    out = io.BytesIO()
    write_rows(make(ROWS).path, slice(start, stop), out)
    first, *rows = out.getvalue().splitlines()
    assert [int(first) + i for i in range(len(rows))] == numbers
    lines = tmp_path / "toy.jsonl"
    lines.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    bounds = ":".join("" if end is None else str(end) for end in (start, stop))
    source = RowSource(f"{lines}@[{bounds}]")
    assert [row.number for row in source] == numbers


def test_a_digest_tells_which_rows_were_taken_not_how_they_are_packed(make: Any) -> None:
    def digest(rows: list[dict[str, Any]], part: str = "", **packing: Any) -> str:
        eval_set = make(rows)
        parquet.write_table(pa.Table.from_pylist(rows), eval_set.path, **packing)
        source = RowSource(eval_set.path + part)
        assert list(source)
        return source.digest

    first_two = digest(ROWS, "@[:2]")
    assert digest([*ROWS, ROWS[0]], "@[:2]", compression="gzip") == first_two
    assert len({first_two, digest(ROWS), digest(ROWS, "@[1:]")}) == 3


def test_faults_name_the_row_in_the_file(make: Any) -> None:
    rows = [*ROWS, {**ROWS[0], "label": ""}]
    assert problem_of(make(rows, "@[2:]")).startswith(" row 4: key 'label': the reference is empty")
    assert problem_of(make(ROWS, "@[5:]")) == (
        ": the slice takes none of its rows; give another one"
    )


def test_files_that_are_no_parquet(make: Any, tmp_path: Path) -> None:
    gone = EvalSet(name="toy", path=str(tmp_path / "gone.parquet"))
    assert problem_of(gone) == ": No such file or directory; set path to a Parquet file"
    eval_set = make(ROWS)
    Path(eval_set.path).write_bytes(b"PAR1 not at all PAR1")
    assert problem_of(eval_set).startswith(": it cannot be read as Parquet: ")
    (tmp_path / "dir.parquet").mkdir()
    eval_set = msgspec.structs.replace(gone, path=str(tmp_path / "dir.parquet"))
    assert problem_of(eval_set) == ": Is a directory; set path to a Parquet file"


def test_a_conversion_that_never_ends_is_killed(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(row_source, "_PARQUET_TIMEOUT_S", 0.2)
    assert problem_of(make(ROWS)) == ": the process that reads it ended with exit code -9"


def test_the_daemons_process_stays_without_pyarrow(make: Any) -> None:
    eval_set = make(ROWS)
    program = (
        "import sys; from evald.config import EvalSet; from evald.evals.sets import load_set; "
        f"load_set(EvalSet(name='toy', path={eval_set.path!r})); "
        "sys.exit(bool({'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_gaps_are_left_out_of_what_is_nested_only() -> None:
    value = [{"a": None, "b": [None, {"c": None, "d": 0}]}, ("x", None)]
    assert without_gaps(value) == [{"b": [None, {"d": 0}]}, ["x", None]]
