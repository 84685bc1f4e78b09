"""Results for a logger of one's own, and for the trainer's own W&B run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from sink_cases import Book, ended, run_end, set_done

from evald.errors import EvaldError
from evald.results.sinks import WandbBuffer, follow


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results")


def steps(
    book: Book, cursor: Path | None, n: int | None = None, run: str | None = None
) -> list[int]:
    rows = follow(book.path.parent, cursor=cursor, once=True, run=run)
    return [row.step for row in itertools.islice(rows, n)]


def test_each_row_comes_once_in_many_lives(book: Book, tmp_path: Path) -> None:
    cursor = tmp_path / "cursors" / "mine"
    assert steps(book, cursor) == []
    book.add(set_done(1), ended(1, a=0.5, b=1), ended(2, run="other", a=1))
    assert steps(book, cursor) == [1, 1, 2]
    book.add(ended(3, a=0.5))
    assert steps(book, cursor) == [3]
    assert steps(book, cursor) == []
    assert steps(book, None, run="demo") == [1, 1, 3]


def test_the_row_in_whose_middle_a_life_ends_comes_again(book: Book, tmp_path: Path) -> None:
    book.add(ended(1, a=0.5), ended(2, a=0.5), ended(3, a=0.5))
    assert steps(book, tmp_path / "mine", 2) == [1, 2]
    assert steps(book, tmp_path / "mine") == [2, 3]


def test_another_ledger_comes_whole(book: Book, tmp_path: Path) -> None:
    book.add(ended(1, a=0.5), ended(2, a=0.5))
    assert steps(book, tmp_path / "mine") == [1, 2]
    other = Book(tmp_path / "other", time=9000.0)
    other.add(ended(1, a=0.75))
    assert steps(other, tmp_path / "mine") == [1]
    assert steps(other, tmp_path / "mine") == []


def test_a_ledger_that_is_replaced_meanwhile_comes_whole(book: Book, tmp_path: Path) -> None:
    book.add(ended(1, a=0.5), ended(2, a=0.5))
    assert steps(book, tmp_path / "mine") == [1, 2]
    book.add(ended(3, a=0.5))
    rows = follow(book.path.parent, cursor=tmp_path / "mine", poll_s=0.01)
    assert next(rows).step == 3
    book.path.unlink()
    Book(tmp_path / "results", time=9000.0).add(ended(1, a=0.5), ended(2, a=0.75), ended(3, a=1))
    assert [next(rows).metrics["eval/a"] for _ in range(3)] == [0.5, 0.75, 1]
    rows.close()


def test_rows_are_given_as_they_come(book: Book) -> None:
    rows = follow(book.path.parent, poll_s=0.01)
    for step in (1, 2):
        book.add(ended(step, a=step))
        assert next(rows).metrics == {"eval/a": step}
    rows.close()


class Run:
    """As much of a W&B run as a buffer needs; the real one is in the integration tests."""

    def __init__(self) -> None:
        self.step = 0
        self.logged: list[dict[str, float]] = []
        self.summary: dict[str, float] = {}

    def define_metric(self, *_: object, **__: object) -> None:
        """Take it."""

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)


def test_a_buffer_takes_records_as_poll_gives_them(book: Book) -> None:
    book.add(set_done(40, "a", 0.5), ended(40, a=0.5, b=1), run_end(), ended(40, a=0.5, b=1))
    book.add(ended(20, 1, a=0.25))
    run = Run()
    buffer = WandbBuffer(run)
    for line in book.path.read_text().splitlines():
        buffer.add(json.loads(line))
    assert len(buffer) == 3
    assert buffer.before_commit(1) == {"eval/step": 40, "eval/a": 0.5}
    assert buffer.before_commit(1) == {}
    run.step = 9
    assert buffer.before_commit(8) == {}
    assert buffer.before_commit() == {"eval/step": 40, "eval/b": 1}
    buffer.finish()
    late = {"eval/step": 20, "eval/a": 0.25, "eval/revision": 1}
    assert run.logged == [{}, late]
    assert run.summary == {"eval/step": 40, "eval/a": 0.5, "eval/b": 1, "eval/revision": 1}
    assert buffer.before_commit(10) == {}


def test_a_buffer_refuses_what_is_no_record() -> None:
    with pytest.raises(EvaldError, match=r"cannot log a record: .*; give it as poll"):
        WandbBuffer(Run()).add({"schema": 1, "seq": 1, "type": "point"})
