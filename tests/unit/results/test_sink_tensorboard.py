"""Event files, read back with TensorBoard's own accumulator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from sink_cases import Book, deliver, ended, run_end, set_done, skipped
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evald.results.sinks.tensorboard import EventFormat, TensorBoardSink


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def life(book: Book, logs: Path, **options: Any) -> int:
    events = EventFormat()
    return deliver(book, lambda run: TensorBoardSink(logs, run, events), **options)


def read(logs: Path, run: str = "demo") -> EventAccumulator:
    accumulator = EventAccumulator(str(logs / run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def curve(logs: Path, name: str = "eval/a", run: str = "demo") -> list[tuple[int, float]]:
    return [
        (event.step, round(event.value, 6)) for event in read(logs, run).Scalars(name)
    ]  # (values are 32-bit floats)


def test_points_stand_at_their_own_steps_and_times(book: Book, logs: Path) -> None:
    book.add(set_done(40, "a", 0.5), ended(40, a=0.5, b=0.25), ended(50, a=0.75), skipped(60))
    assert [life(book, logs), life(book, logs)] == [4, 0]
    assert curve(logs) == [(40, 0.5), (50, 0.75)]
    assert curve(logs, "eval/b") == [(40, 0.25)]
    assert curve(logs, "eval/skipped_busy") == [(60, 1)]
    (event, _) = read(logs).Scalars("eval/a")
    assert event.wall_time == 1001.0
    assert "eval/step" not in read(logs).Tags()["scalars"]


@pytest.mark.parametrize("in_lives", [False, True])
def test_late_points_take_nothing_with_them(book: Book, logs: Path, *, in_lives: bool) -> None:
    for step in (20, 40, 50, 10, 30, 0):
        book.add(set_done(step, "a", step / 100), ended(step, a=step / 100, b=1))
        if in_lives:
            life(book, logs)
    life(book, logs)
    assert curve(logs) == [(step, step / 100) for step in (0, 10, 20, 30, 40, 50)]
    assert curve(logs, "eval/b") == [(step, 1) for step in (0, 10, 20, 30, 40, 50)]


def test_a_new_revision_replaces_the_point_also_in_a_later_life(book: Book, logs: Path) -> None:
    book.add(ended(10, a=0.1, b=1), ended(20, a=0.2, b=2), ended(30, a=0.3))
    life(book, logs)
    book.add(ended(20, 1, a=0.9))
    life(book, logs)
    assert curve(logs) == [(10, 0.1), (20, 0.9), (30, 0.3)]
    ((_, first), (step, gone)) = curve(logs, "eval/b")
    assert (first, step, math.isnan(gone)) == (1, 20, True)


def test_a_killed_life_leaves_nothing_twice(
    book: Book, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    for step in (20, 10, 30):
        book.add(ended(step, a=step / 100))
        monkeypatch.setattr("evald.results.sinks.cursor.store", die)
        with pytest.raises(Killed):
            life(book, logs)
        monkeypatch.undo()
    life(book, logs)
    assert curve(logs) == [(10, 0.1), (20, 0.2), (30, 0.3)]
    raw = (logs / "demo" / "events.out.tfevents.evald").read_bytes()
    life(book, logs)
    assert (logs / "demo" / "events.out.tfevents.evald").read_bytes() == raw


def test_hostile_names_become_tags(book: Book, logs: Path) -> None:
    point = ended(1, ok=2.0)
    point.metrics["eval/a\nb"] = 1.0
    book.add(point)
    life(book, logs)
    tags = read(logs).Tags()["scalars"]
    assert len(tags) == 2
    assert all(name.isprintable() for name in tags)


def test_another_ledger_begins_anew_beside_the_old_curve(tmp_path: Path, logs: Path) -> None:
    first, second = Book(tmp_path / "1"), Book(tmp_path / "2", time=5000.0)
    first.add(ended(1, a=0.5), ended(2, a=0.5))
    second.add(ended(1, a=0.75))
    life(first, logs)
    life(second, logs)
    assert [
        (event.step, event.value)
        for path in (logs / "demo").glob("events*")
        for event in _scalars(path)
    ] == [(1, 0.75)]
    (aside,) = (logs / "demo").glob("earlier-*")
    assert curve(logs / "demo", run=aside.name) == [(1, 0.5), (2, 0.5)]


def _scalars(path: Path) -> list[Any]:
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return list(accumulator.Scalars("eval/a"))


def test_a_run_that_goes_on_after_its_end_does_so_here(book: Book, logs: Path) -> None:
    book.add(ended(1, a=0.5), run_end())
    life(book, logs)
    book.add(ended(2, a=0.75))
    life(book, logs)
    assert curve(logs) == [(1, 0.5), (2, 0.75)]


def test_a_regrade_of_all_points_writes_the_curve_once_more(book: Book, logs: Path) -> None:
    book.add(*(ended(step, a=step / 1000) for step in range(1, 301)))
    life(book, logs)
    file = logs / "demo" / "events.out.tfevents.evald"
    before = file.stat().st_size
    book.add(*(ended(step, 1, a=step / 500) for step in range(1, 301)))
    life(book, logs)
    assert curve(logs) == [(step, step / 500) for step in range(1, 301)]
    assert file.stat().st_size < 2.5 * before
