"""What a W&B sink does when W&B does not work; the real library is in the integration tests."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sink_cases import Book, deliver, ended, run_end

from evald.errors import EvaldError
from evald.results.sinks import wandb
from evald.results.sinks.contract import SinkFault
from evald.results.sinks.wandb import WandbOptions, WandbSink, run_id


class Run:
    """A run of the fake W&B; ``kept``: what the server has of it."""

    offline = False

    def __init__(self, library: Library, kept: list[dict[str, Any]]) -> None:
        self.resumed = bool(kept)
        self.starting_step = len(kept)
        self.settings = SimpleNamespace(sync_file=str(library.file))
        self.summary: dict[str, Any] = {}
        self._library = library
        self._kept = kept

    def define_metric(self, *_: object, **__: object) -> None:
        """Take it."""

    def log(self, data: dict[str, Any]) -> None:
        if self._library.dies:
            raise ConnectionResetError("Connection lost")
        self._kept.append(data)

    def finish(self) -> None:
        self._library.may_finish.wait(10)
        if self.offline:
            self._library.file.write_bytes(b"x" * self._library.written)


class Library:
    """As much of ``wandb`` as the sink uses, with faults."""

    class Error(Exception):
        pass

    class UsageError(Error):
        pass

    class AuthenticationError(Error):
        pass

    Settings = dict

    def __init__(self, directory: Path) -> None:
        self.errors = self
        self.file = directory / "run.wandb"
        self.written = 1000
        self.refusals: list[Exception] = []
        self.dies = False
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.server: list[dict[str, Any]] = []

    def init(self, *, mode: str | None, **_: object) -> Run:
        if self.refusals:
            raise self.refusals.pop(0)
        run = Run(self, [] if mode == "offline" else self.server)
        run.offline = mode == "offline"
        return run


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path / "results")
    book.add(ended(1, a=0.5))
    return book


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr("evald.results.sinks.delivery._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(wandb, "_LOOK_S", 0.001)
    monkeypatch.setattr(wandb, "WRITTEN_S", 0.05)
    monkeypatch.setattr(wandb, "FINISH_S", 0.05)
    return Library(tmp_path)


def life(book: Book, library: Library, mode: str | None = None, **options: Any) -> int:
    directory = book.path.parent.parent
    return deliver(
        book,
        lambda run: WandbSink(directory, run, WandbOptions(mode=mode), module=library),
        **options,
    )


def steps(library: Library) -> list[int]:
    return [row["eval/step"] for row in library.server]


def test_a_network_that_comes_back_costs_nothing(book: Book, library: Library) -> None:
    library.refusals = [library.Error("no network"), OSError(28, "No space left on device")]
    said: list[str] = []
    assert life(book, library, patience_s=30, said=said) == 1
    assert said == [
        "cannot begin W&B run demo-eval: no network; trying again for 30 s at most",
        "that works again; nothing was lost",
    ]
    assert steps(library) == [1]


@pytest.mark.parametrize("kind", ["UsageError", "AuthenticationError"])
def test_a_missing_key_is_not_tried_again(book: Book, library: Library, kind: str) -> None:
    library.refusals = [getattr(library, kind)("no key")]
    with pytest.raises(EvaldError, match="no key; `wandb login`, or --mode offline") as refused:
        life(book, library, patience_s=60)
    assert not isinstance(refused.value, SinkFault)


def test_an_upload_that_takes_long_is_waited_for(book: Book, library: Library) -> None:
    library.may_finish.clear()
    said: list[str] = []
    timer = threading.Timer(0.3, library.may_finish.set)
    timer.start()
    book.add(run_end())
    assert life(book, library, patience_s=30, said=said) == 1
    assert said[0].startswith("cannot finish W&B run demo-eval: W&B is still uploading; trying")
    assert life(book, library) == 0
    timer.join()


def test_what_was_uploaded_by_a_life_that_could_not_finish_comes_once(
    book: Book, library: Library
) -> None:
    library.may_finish.clear()
    with pytest.raises(SinkFault, match="still uploading"):
        life(book, library)
    library.may_finish.set()
    book.add(ended(2, a=0.5))
    life(book, library)
    assert steps(library) == [1, 2]


def test_a_run_that_is_made_anew_and_killed_again_gets_all(book: Book, library: Library) -> None:
    book.add(ended(2, a=0.5), ended(3, a=0.5))
    life(book, library)
    library.server.clear()  # deleted there
    book.add(ended(4, a=0.5))
    library.may_finish.clear()
    with pytest.raises(SinkFault):
        life(book, library)
    library.may_finish.set()
    del library.server[2:]  # and what it logged last has not arrived
    life(book, library)
    assert steps(library) == [1, 2, 3, 4]


def test_a_library_that_has_died_ends_this_life_and_the_next_goes_on(
    book: Book, library: Library
) -> None:
    library.dies = True
    with pytest.raises(EvaldError, match=r"W&B's own process has gone .*run the command again"):
        life(book, library, patience_s=60)
    library.dies = False
    assert life(book, library) == 1
    assert steps(library) == [1]


def test_an_offline_run_that_the_disk_had_no_room_for_is_written_again(
    book: Book, library: Library
) -> None:
    library.written = 3
    with pytest.raises(SinkFault, match=r"W&B has put 3 bytes into it; is the disk full"):
        life(book, library, "offline")
    library.written = 1000
    assert life(book, library, "offline") == 1
    assert life(book, library, "offline") == 0


def test_ids_are_never_too_long() -> None:
    assert run_id("demo") == "demo-eval"
    long = "r" * 128
    assert len(run_id(long)) == 128
    assert run_id(long) != run_id(long[:-1] + "x")
