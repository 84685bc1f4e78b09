"""Event files as TensorBoard itself shows them: its server, with its own fast reader of files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from sink_cases import Book, deliver, ended, set_done

from evald.results.sinks.tensorboard import EventFormat, TensorBoardSink

LIMIT_S = 60


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    """The address of a TensorBoard that reads ``runs/`` again and again."""
    said = tmp_path / "tensorboard.log"
    argv = ["--logdir", str(tmp_path / "runs"), "--host", "127.0.0.1", "--port", "0"]
    argv += ["--load_fast", "true", "--reload_interval", "1"]
    with said.open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tensorboard.main", *argv],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said.read_text())):
            assert server.poll() is None, said.read_text()
            assert time.monotonic() < deadline_s, said.read_text()
            time.sleep(0.1)
        yield found[0]
    finally:
        server.terminate()
        server.wait(LIMIT_S)


def curve(board: str, name: str) -> list[list[float]]:
    query = urlencode({"run": "demo", "tag": name})
    try:
        with urlopen(f"{board}/data/plugin/scalars/scalars?{query}", timeout=30) as answer:  # noqa: S310 # loopback
            shown: list[list[Any]] = json.load(answer)
    except HTTPError:  # it has not read the file yet
        return []
    return [[step, round(value, 6)] for _, step, value in shown]


def until(board: str, name: str, expected: list[list[float]]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while (shown := curve(board, name)) != expected:
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)


def test_a_late_point_and_a_new_revision_take_nothing_with_them(tmp_path: Path, board: str) -> None:
    book = Book(tmp_path / "results")
    events = EventFormat()

    def life() -> None:
        deliver(book, lambda run: TensorBoardSink(tmp_path / "runs", run, events))

    book.add(set_done(20, "a", 0.2), ended(20, a=0.2), ended(30, a=0.3), ended(40, a=0.4))
    life()
    until(board, "eval/a", [[20, 0.2], [30, 0.3], [40, 0.4]])
    book.add(ended(10, a=0.1), ended(30, 1, a=0.9))
    life()
    until(board, "eval/a", [[10, 0.1], [20, 0.2], [30, 0.9], [40, 0.4]])
