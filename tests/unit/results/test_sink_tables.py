"""Tables of samples, and what TensorBoard gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sink_cases import Book, deliver, ended, set_done, skipped
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evald.results.samples import SampleRecord
from evald.results.sinks.rows import Row, Rows
from evald.results.sinks.stored import open_stored
from evald.results.sinks.tables import SampleTables
from evald.results.sinks.tensorboard import EventFormat, TensorBoardSink


def sample(question: str, score: float | None, *, config: str = "c", **more: Any) -> bytes:
    record = SampleRecord(
        question=question,
        sample=0,
        digest="d",
        config=config,
        status="scored" if score is not None else "error",
        score=score,
        **{"response": f"answer {score}", "reference": "42", **more},
    )
    return msgspec.json.encode(record) + b"\n"


def write(directory: Path, step: int, *lines: bytes) -> None:
    path = directory / "results" / "samples" / "demo" / f"step_{step}.r0" / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(lines))


@pytest.fixture
def tables(tmp_path: Path) -> SampleTables:
    return SampleTables(open_stored(str(tmp_path / "results")), 2)


def last_row(*records: Any) -> Row:
    rows = Rows()
    taken = [row for record in records if (row := rows.take(record)) is not None]
    return taken[-1]


def two_points() -> Row:
    return last_row(set_done(10), ended(10, a=0.5), set_done(20), ended(20, a=0.5, b=1))


def test_the_first_samples_and_those_that_changed_most(
    tmp_path: Path, tables: SampleTables
) -> None:
    write(
        tmp_path,
        10,
        sample("q1", 0),
        sample("q2", 0.5),
        sample("q3", 0.5),
        sample("q4", 0),
        sample("q5", None),
    )
    write(
        tmp_path,
        20,
        sample("q1", None),
        sample("q1", 1),  # asked again
        sample("q2", 0.5),
        sample("q3", 0.6),
        sample("q4", 0.9, reference=["a", 1], grader_reason="close"),
        sample("q5", 1),
        b'{"torn',
    )
    made = tables.of(two_points())
    assert list(made) == ["eval/a/samples", "eval/a/flips"]
    shown = [
        dict(zip(made["eval/a/samples"].columns, row, strict=True))
        for row in made["eval/a/samples"].rows
    ]
    assert [(row["question"], row["score"], row["response"]) for row in shown] == [
        ("q1", 1, "answer 1"),
        ("q2", 0.5, "answer 0.5"),
    ]
    flips = [
        dict(zip(made["eval/a/flips"].columns, row, strict=True))
        for row in made["eval/a/flips"].rows
    ]
    assert [(row["question"], row["score before"], row["score"]) for row in flips] == [
        ("q1", 0, 1),
        ("q4", 0, 0.9),
    ]
    assert flips[1]["response before"] == "answer 0"
    assert (flips[1]["reference"], flips[1]["reason"]) == ('["a",1]', "close")


def test_what_was_measured_otherwise_is_neither_shown_nor_compared(
    tmp_path: Path, tables: SampleTables
) -> None:
    write(tmp_path, 10, sample("q2", 1, config="old"))
    write(tmp_path, 20, sample("q1", 1, config="old"), sample("q2", 0))
    made = tables.of(two_points())
    assert list(made) == ["eval/a/samples"]
    assert [row[0] for row in made["eval/a/samples"].rows] == ["q2"]


def test_what_is_no_longer_there_makes_no_table(tmp_path: Path, tables: SampleTables) -> None:
    row = two_points()
    assert tables.of(row) == {}
    write(tmp_path, 20, sample("q1", 1))
    assert list(tables.of(row)) == ["eval/a/samples"]
    assert tables.of(last_row(set_done(20), skipped(20, void=("a",)))) == {}
    assert tables.of(last_row(set_done(20))) == {}


def test_samples_that_cannot_be_read_cost_only_their_tables(
    tmp_path: Path, tables: SampleTables, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "samples" / "demo" / "step_20.r0" / "a.jsonl"
    path.mkdir(parents=True)
    for _ in range(2):
        assert tables.of(two_points()) == {}
    assert capsys.readouterr().out.count("samples_unreadable") == 1


def test_tensorboard_gets_them_as_text_that_stays_in_its_cells(
    tmp_path: Path, tables: SampleTables
) -> None:
    book = Book(tmp_path / "results")
    book.add(set_done(20), ended(20, a=0.5))
    write(tmp_path, 20, sample("q1", 1, response="<b>|x`\nsecond"))
    book.add(ended(10, a=0.5))  # late: what stands behind it is written again, with its text
    events = EventFormat()
    deliver(book, lambda run: TensorBoardSink(tmp_path / "runs", run, events, tables=tables))
    accumulator = EventAccumulator(str(tmp_path / "runs" / "demo"))
    accumulator.Reload()
    event = accumulator.Tensors("eval/a/samples/text_summary")[-1]
    (text,) = event.tensor_proto.string_val
    assert event.step == 20
    assert text.decode().splitlines()[2] == (
        "|q1|0|1.0|scored|False|&lt;b>&#124;x&#96;<br>second|42||"
    )
    assert (
        accumulator.summary_metadata["eval/a/samples/text_summary"].plugin_data.plugin_name
        == "text"
    )
