"""Results in W&B online: the real library, and a server on loopback that keeps what it is sent."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_wandb import FakeWandb
from sink_cases import Book, ended, set_done
from wandb_reader import finish, start, until

RUN = "demo-eval"


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results")


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    with FakeWandb() as fake:
        yield fake


def online(book: Book, server: FakeWandb, *options: object) -> subprocess.Popen[str]:
    return start(
        book,
        "--project",
        "p",
        *options,
        WANDB_BASE_URL=server.url,
        WANDB_API_KEY="k" * 40,
        WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1",
    )


def wait_for_rows(server: FakeWandb, n: int) -> None:
    until(lambda: len(server.rows(RUN)) == n)


def points(*steps: int) -> list[dict[str, Any]]:
    return [{"eval/step": step, "eval/a": step} for step in steps]


def test_lives_that_are_killed_and_one_that_ends_well_deliver_each_point_once(
    book: Book, server: FakeWandb
) -> None:
    book.add(set_done(1, "a", 1), ended(1, a=1, b=2))
    for n_rows in (2, 3):
        reader = online(book, server)
        wait_for_rows(server, n_rows)
        book.add(ended(n_rows, a=n_rows))
        wait_for_rows(server, n_rows + 1)
        reader.kill()  # it could tell nobody how far it got
        finish(reader, -signal.SIGKILL)
    book.add(ended(5, a=5))
    finish(online(book, server, "--once"))
    assert server.rows(RUN) == [
        *points(1),
        {"eval/step": 1, "eval/b": 2},
        *points(2, 3, 5),
    ]
    assert [row["_step"] for row in server.history[RUN]] == list(range(5))
    assert server.summary[RUN]["eval/a"] == 5


def test_another_ledger_or_a_run_that_was_deleted_there_loses_nothing(
    book: Book, server: FakeWandb, tmp_path: Path
) -> None:
    book.add(ended(1, a=1), ended(2, a=2))
    finish(online(book, server, "--once"))
    other = Book(tmp_path / "results2", time=9000.0)
    other.add(ended(1, a=1))
    said = finish(online(other, server, "--once"))
    assert "is not the ledger that W&B run demo-eval has rows of" in said
    assert server.rows(RUN) == points(1, 2, 1)
    other.add(ended(2, a=2))
    finish(online(other, server, "--once"))
    assert server.rows(RUN) == points(1, 2, 1, 2)
    server.history.clear()
    other.add(ended(3, a=3))
    finish(online(other, server, "--once"))
    assert server.rows(RUN) == points(1, 2, 3)


def test_without_a_key_it_says_what_to_do(book: Book, server: FakeWandb) -> None:
    book.add(ended(1, a=1))
    reader = start(book, "--once", "--mode", "online", WANDB_BASE_URL=server.url)
    said = finish(reader, 1)
    assert "cannot begin W&B run demo-eval" in said
    assert "`wandb login`, or --mode offline" in said
