"""Sinks that are files: jsonl stands for both where they share their way."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sink_cases import Book, deliver, ended, run_end, set_done, skipped

from evald.errors import EvaldError
from evald.file_lock import hold
from evald.results.sinks import cursor as cursors
from evald.results.sinks.contract import SinkFault
from evald.results.sinks.cursor import Cursor
from evald.results.sinks.jsonl import JsonlSink
from evald.results.sinks.rows import Row


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def lines(rows: Path, run: str = "demo") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (rows / f"{run}.jsonl").read_text().splitlines()]


def life(book: Book, rows: Path, **options: Any) -> int:
    return deliver(book, lambda run: JsonlSink(rows, run), **options)


def test_rows_are_flat_and_each_comes_once_in_many_lives(book: Book, rows: Path) -> None:
    book.add(set_done(40), ended(40, a=0.5, b=1))
    assert [life(book, rows), life(book, rows)] == [2, 0]
    book.add(skipped(50), ended(30, a=0.25))
    assert [life(book, rows), life(book, rows)] == [2, 0]
    found = lines(rows)
    assert found[0] == {
        "record_id": "demo/step/40/r0/a",
        "run": "demo",
        "kind": "step",
        "step": 40,
        "revision": 0,
        "time": 1001.0,
        "seq": 1,
        "outcome": "",
        "reason": "",
        "eval/a": 0.5,
    }
    assert [(one["step"], one["outcome"], one["reason"]) for one in found] == [
        (40, "", ""),
        (40, "ok", ""),
        (50, "skipped", "busy"),
        (30, "ok", ""),
    ]
    assert found[2]["eval/skipped_busy"] == 1


def test_what_stands_no_longer_is_null(book: Book, rows: Path) -> None:
    book.add(set_done(40), skipped(40, "crashed", void=("a",)))
    life(book, rows)
    assert lines(rows)[1]["eval/a"] is None


def test_each_run_has_a_file_of_its_own(book: Book, rows: Path) -> None:
    book.add(ended(1, a=1), ended(1, run="other", a=2))
    assert life(book, rows, run="other") == 1
    assert not (rows / "demo.jsonl").exists()
    assert life(book, rows) == 1
    assert [one["eval/a"] for one in lines(rows) + lines(rows, "other")] == [1, 2]


def test_a_life_that_is_killed_before_its_cursor_leaves_nothing_twice(
    book: Book, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_path: Path, _cursor: Cursor) -> None:
        raise Killed

    for step in (1, 2, 3):
        book.add(set_done(step), ended(step, a=0.5, b=1))
        monkeypatch.setattr(cursors, "store", die)
        with pytest.raises(Killed):
            life(book, rows)
        assert len(lines(rows)) >= 2 * step  # it was written, and nobody was told
        monkeypatch.undo()
        if step != 2:
            assert life(book, rows) > 0
    assert [one["seq"] for one in lines(rows)] == [1, 2, 3, 4, 5, 6]


def test_a_torn_line_of_a_killed_life_is_cut_off(book: Book, rows: Path) -> None:
    book.add(ended(1, a=0.5))
    life(book, rows)
    with (rows / "demo.jsonl").open("a") as file:
        file.write('{"record_id": "demo/st')
    book.add(ended(2, a=0.5))
    life(book, rows)
    assert [one["step"] for one in lines(rows)] == [1, 2]


def test_a_full_disk_is_waited_for_said_once_and_costs_nothing(
    book: Book, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.add(ended(1, a=0.5))
    life(book, rows)
    book.add(ended(2, a=0.5))
    write = os.write
    refused: list[int] = []

    def full(descriptor: int, content: bytes) -> int:
        if len(refused) < 3 and len(content) > 50:
            refused.append(write(descriptor, content[:7]))  # part of it still went in
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr("evald.results.sinks.delivery._FIRST_DELAY_S", 0.01)
    said: list[str] = []
    assert life(book, rows, patience_s=30, said=said) == 1
    assert said == [
        f"cannot deliver into {rows}: No space left on device; trying again for 30 s at most",
        "that works again; nothing was lost",
    ]
    assert [one["step"] for one in lines(rows)] == [1, 2]


def test_a_disk_that_stays_full_ends_it_and_the_next_life_goes_on(
    book: Book, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.add(ended(1, a=0.5))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(SinkFault, match=r"cannot deliver into .*: No space left on device"):
        life(book, rows)
    monkeypatch.undo()
    assert life(book, rows) == 1
    assert len(lines(rows)) == 1


def test_what_cannot_become_good_is_not_tried_again(book: Book, tmp_path: Path) -> None:
    book.add(ended(1, a=0.5))
    (tmp_path / "file").touch()
    with pytest.raises(EvaldError, match=r"cannot deliver into .*; name another --dir") as refused:
        life(book, tmp_path / "file" / "rows", patience_s=60)
    assert not isinstance(refused.value, SinkFault)


def test_two_readers_never_write_one_file(book: Book, rows: Path) -> None:
    book.add(ended(1, a=0.5))
    life(book, rows)
    lock = os.open(rows / ".demo.cursor.lock", os.O_RDWR)
    try:
        assert hold(lock) is None
        with pytest.raises(EvaldError, match=f"process {os.getpid()} does already; stop it"):
            life(book, rows)
    finally:
        os.close(lock)
    assert life(book, rows) == 0


def test_a_file_that_was_deleted_is_written_again(book: Book, rows: Path) -> None:
    book.add(ended(1, a=0.5), ended(2, a=0.5))
    life(book, rows)
    (rows / "demo.jsonl").unlink()
    assert life(book, rows) == 2
    assert [one["step"] for one in lines(rows)] == [1, 2]


def test_another_ledger_is_delivered_whole_and_the_old_rows_are_kept_aside(
    tmp_path: Path, rows: Path
) -> None:
    first, second = Book(tmp_path / "1"), Book(tmp_path / "2", time=5000.0)
    first.add(ended(1, a=0.5), ended(2, a=0.5))
    second.add(ended(1, a=0.75))
    life(first, rows)
    said: list[str] = []
    assert life(second, rows, said=said) == 1
    assert "is not the ledger that" in said[0]
    assert [one["eval/a"] for one in lines(rows)] == [0.75]
    (aside,) = rows.glob("earlier-*/demo.jsonl")
    assert len(aside.read_text().splitlines()) == 2
    assert life(second, rows) == 0


def test_a_run_that_goes_on_after_its_end_does_so_here(book: Book, rows: Path) -> None:
    book.add(ended(1, a=0.5), run_end())
    life(book, rows)
    book.add(ended(1, 1, a=0.75))
    assert life(book, rows) == 1
    assert [one["revision"] for one in lines(rows)] == [0, 1]


def test_a_line_that_is_no_record_costs_no_other(book: Book, rows: Path) -> None:
    book.add(ended(1, a=0.5))
    with book.path.open("ab") as file:
        file.write(b'no json\n{"schema":1,"seq":2,"type":"future"}\n{"schema":9,"seq":3}\n')
    book.add(ended(2, a=0.5))
    assert life(book, rows) == 2


@pytest.mark.parametrize("when", ["while it is open", "after the run's end", "replaced"])
def test_a_file_that_goes_in_the_middle_is_not_written_into_nothing(
    book: Book, rows: Path, when: str
) -> None:
    sink = JsonlSink(rows, "demo")
    sink.cursor()
    book.add(ended(1, a=0.5), ended(2, a=0.5))
    first, second = (Row(seq=n, record_id=f"r{n}", time=1.0, run="demo", step=n, metrics={"a": 1})
                     for n in (1, 2))  # fmt: skip
    sink.take(first)
    sink.flush()
    if when == "after the run's end":
        sink.close()
    shutil.rmtree(rows)
    if when == "replaced":
        rows.mkdir()
        (rows / "demo.jsonl").write_text("somebody else's\n")
    sink.take(second)
    with pytest.raises(EvaldError, match=r"cannot go on with .*/demo\.jsonl: somebody has deleted"):
        sink.flush()
    with pytest.raises(EvaldError, match="cannot go on with"):
        sink.close()
    assert life(book, rows) == 2
    assert [one["step"] for one in lines(rows)] == [1, 2]


def test_a_run_leads_nowhere_else(book: Book, rows: Path) -> None:
    book.add(ended(1, run="../evil", a=0.5), ended(2, run="", a=0.5), ended(3, a=0.5))
    assert life(book, rows) == 1
    assert not list(rows.parent.rglob("*evil*"))
    assert [one["step"] for one in lines(rows)] == [3]
