"""Results in W&B: the real library, offline, and its file read back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sink_cases import Book, ended, run_end, set_done, skipped
from wandb_file import WandbFile
from wandb_reader import LIMIT_S, environment, files, finish, start, until


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results")


def offline(book: Book, *options: object) -> subprocess.Popen[str]:
    return start(book, "--mode", "offline", *options)


def until_next_second() -> None:
    now = int(time.time())
    until(lambda: int(time.time()) > now)


def test_points_arrive_once_at_their_own_steps_however_late(book: Book) -> None:
    book.add(set_done(40, "a", 0.5), ended(40, a=0.5, b=0.25), ended(20, a=0.2), skipped(30))
    book.add(ended(40, 1, a=0.75), ended(10, a=0.1), run_end())
    book.add(ended(1, run="other", a=2))
    finish(offline(book, "--once", "--group", "trainer", "--project", "p"))
    (path,) = files(book)
    file = WandbFile(path)
    assert file.history == [
        {"eval/step": 40, "eval/a": 0.5},
        {"eval/step": 40, "eval/b": 0.25},
        {"eval/step": 20, "eval/a": 0.2},
        {"eval/step": 30, "eval/skipped_busy": 1},
        {"eval/step": 40, "eval/revision": 1, "eval/a": 0.75, "eval/b": "NaN"},
        {"eval/step": 10, "eval/a": 0.1},
    ]
    assert file.steps == list(range(6))
    assert file.step_metrics["eval/*"] == "eval/step"
    assert (file.run.run_id, file.run.run_group, file.run.project) == ("demo-eval", "trainer", "p")
    summary = file.summary
    assert (summary["eval/a"], summary["eval/b"], summary["eval/step"]) == (0.75, "NaN", 40)
    (other,) = files(book, "other-eval")
    assert WandbFile(other).history == [{"eval/step": 1, "eval/a": 2}]


def test_the_newest_directory_has_each_point_once_however_lives_have_ended(book: Book) -> None:
    book.add(*(ended(step, a=step) for step in range(3)))
    reader = offline(book)
    until(lambda: files(book))  # it has a run, with some of the rows or all
    reader.kill()
    finish(reader, -signal.SIGKILL)
    until_next_second()  # W&B names its directories by the second
    reader = offline(book)
    until(lambda: len(files(book)) == 2)
    book.add(ended(3, a=3))
    reader.terminate()
    assert finish(reader).endswith(" delivered\n")
    until_next_second()
    finish(offline(book, "--once"))
    expected = [{"eval/step": step, "eval/a": step} for step in range(4)]
    assert WandbFile(files(book)[-1]).history == expected
    n_files = len(files(book))
    finish(offline(book, "--once"))  # nothing new: no new directory
    assert len(files(book)) == n_files


JOB = """
import sys, wandb
from evald.results.sinks import WandbBuffer, follow

run = wandb.init(mode="offline", dir=sys.argv[2], id="trainer")
evals = WandbBuffer(run)
for row in follow(sys.argv[1], once=True):
    evals.add(row)
for step in range(100, 103):
    run.log({"loss": step / 100, **evals.before_commit(step)}, step=step)
    run.log({"lr": 1, **evals.before_commit(step)}, step=step)
assert evals.before_commit(50) == {}  # W&B would drop it
evals.finish()
"""


def test_in_the_trainers_own_run_each_commit_takes_one_point_and_no_step_is_lost(
    book: Book,
) -> None:
    book.add(*(ended(step, a=step) for step in (40, 10, 20, 30)), ended(25, a=25))
    directory = book.path.parent.parent
    subprocess.run(
        [sys.executable, "-c", JOB, book.path.parent, directory],
        env=environment(directory),
        check=True,
        timeout=LIMIT_S,
    )
    file = WandbFile(files(book, "trainer")[0])
    assert file.history == [
        {"loss": 1.0, "lr": 1, "eval/step": 40, "eval/a": 40},
        {"loss": 1.01, "lr": 1, "eval/step": 10, "eval/a": 10},
        {"loss": 1.02, "lr": 1, "eval/step": 20, "eval/a": 20},
        {"eval/step": 30, "eval/a": 30},
        {"eval/step": 25, "eval/a": 25},
    ]
    assert file.steps[:3] == [100, 101, 102]
    assert file.summary["eval/a"] == 40
