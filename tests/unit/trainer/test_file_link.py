"""Asking the daemon by files: whatever is missing, torn or strange there is no error here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evald.results import follow
from evald.results.compressed import compress
from evald.results.modes import Modes
from evald.testing import FakeDaemon
from evald.trainer.links import file_link
from evald.trainer.links.file_link import FileLink
from evald.trainer.publish.names import read_small


def write(ledger: Path, *seqs: int, tail: str = "") -> None:
    with ledger.open("a") as file:
        file.write("".join(json.dumps({"seq": seq, "type": "point"}) + "\n" for seq in seqs) + tail)


def seqs(records: list[dict[str, Any]]) -> list[int]:
    return [record["seq"] for record in records]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


# --- the status ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["root", "run's folder", "beside the ledger"])
def test_status_is_found_where_the_daemon_writes_it(tmp_path: Path, place: str) -> None:
    root, results = tmp_path / "root", tmp_path / "results"
    daemon = FakeDaemon(root, results, run="demo", cap=3)
    daemon.beat()
    daemon.beat()
    if place == "beside the ledger":  # a root that the daemon does not own any more
        board = root / ".evald" / "status.json"
        board.rename(results / "status.json")
        FakeDaemon(root, results, run="before").beat()
        board.write_text(json.dumps(json.loads(board.read_bytes()) | {"time": 1.0}))
    link = FileLink(root / "demo" if place == "run's folder" else root, results)
    status = link.status()
    assert status is not None
    assert (status.beat, status.run, status.cap) == (2, "demo", 3)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"beat": 1}', b"\xff"])
def test_what_is_no_status_is_none(tmp_path: Path, content: bytes) -> None:
    link = FileLink(tmp_path)
    assert link.status() is None
    (tmp_path / ".evald").mkdir()
    (tmp_path / ".evald" / "status.json").write_bytes(content)
    assert link.status() is None


def test_fields_of_a_newer_daemon_do_not_matter(tmp_path: Path) -> None:
    FakeDaemon(tmp_path, tmp_path).beat()
    board = tmp_path / ".evald" / "status.json"
    board.write_text(json.dumps(json.loads(board.read_bytes()) | {"new": {"in": 9}}))
    assert FileLink(tmp_path).status() is not None


def test_the_ledger_is_where_the_status_says(tmp_path: Path) -> None:
    results = tmp_path / "elsewhere"
    daemon = FakeDaemon(tmp_path / "root", results)
    link = FileLink(tmp_path / "root")
    write(daemon.ledger, 1)
    assert link.records(0) == []
    daemon.beat()
    link.status()
    assert link.ledger == daemon.ledger
    assert seqs(link.records(0)) == [1]


# --- the records --------------------------------------------------------------------------------


def test_only_what_is_new_is_read_and_given(ledger: Path) -> None:
    link = FileLink(ledger.parent, ledger)
    assert link.records(0) == []  # there is no such file yet
    write(ledger, 1, 2)
    assert seqs(link.records(0)) == [1, 2]
    assert link.records(2) == []
    write(ledger, 3, 4, 5)
    follower = link._follower
    assert seqs(link.records(3)) == [4, 5]
    assert link._follower is follower  # it went on where it was
    assert seqs(link.records(1)) == [2, 3, 4, 5]  # who asks for older ones gets them
    assert link.records(9) == []
    write(ledger, 6)
    assert seqs(link.records(5)) == [6]
    link.close()
    assert seqs(link.records(5)) == [6]


@pytest.mark.parametrize("results", ["directory", "file"])
def test_the_ledger_or_its_directory(tmp_path: Path, results: str) -> None:
    ledger = tmp_path / "results.jsonl"
    write(ledger, 1)
    link = FileLink(tmp_path, ledger if results == "file" else tmp_path)
    assert seqs(link.records(0)) == [1]


def test_a_torn_line_waits_and_a_broken_one_is_passed_by(ledger: Path) -> None:
    link = FileLink(ledger.parent, ledger)
    write(ledger, 1, tail='{"seq": 2, "ty')
    assert seqs(link.records(0)) == [1]
    write(ledger, tail='pe": "point"}\nrubbish\n[3]\n{"seq": "4"}\n\xff\n')
    assert seqs(link.records(1)) == [2]
    write(ledger, 5)
    assert seqs(link.records(2)) == [5]


def test_a_ledger_that_was_replaced_is_read_from_its_start(ledger: Path) -> None:
    link = FileLink(ledger.parent, ledger)
    write(ledger, 1, 2, 3)
    link.records(0)
    ledger.rename(ledger.with_name("old"))
    write(ledger, 1, 2)
    assert link.records(3) == []
    assert link.restarts == 1
    assert seqs(link.records(0)) == [1, 2]


def test_a_new_ledger_that_has_as_many_records_already_is_told(tmp_path: Path) -> None:
    ledger = tmp_path / "results.jsonl"
    link = FileLink(tmp_path, ledger)
    write(ledger, 1, 2)
    assert seqs(link.records(0)) == [1, 2]
    ledger.rename(tmp_path / "old")
    write(ledger, tail='{"seq": 1, "new": 1}\n{"seq": 2, "new": 1}\n{"seq": 3, "new": 1}\n')
    link.records(2)
    assert link.restarts == 1
    assert seqs(link.records(0)) == [1, 2, 3]
    assert link.restarts == 1


def test_another_ledger_than_before_by_the_status_is_told(tmp_path: Path) -> None:
    link = FileLink(tmp_path / "root")
    for number, name in enumerate(("one", "two")):
        daemon = FakeDaemon(tmp_path / "root", tmp_path / name)
        write(daemon.ledger, 1)
        daemon.beat()
        link.status()
        link.records(number)
        assert link.restarts == number
        assert seqs(link.records(0)) == [1]


def test_a_long_ledger_comes_in_pieces(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_BATCH_BYTES", 100)
    write(ledger, *range(1, 21))
    link = FileLink(ledger.parent, ledger)
    first = seqs(link.records(0))
    assert first == [1, 2, 3]
    assert seqs(link.records(3)) == [4, 5, 6]
    assert seqs(link.records(15)) == [16, 17, 18]
    read = [18]
    while more := link.records(read[-1]):
        read += seqs(more)
    assert read == [18, 19, 20]


def test_a_ledger_that_cannot_be_read_has_no_records(ledger: Path) -> None:
    ledger.mkdir()
    assert FileLink(ledger.parent, ledger).records(0) == []


def test_a_line_of_great_depth_costs_no_other(ledger: Path) -> None:
    write(ledger, 1, tail='{"seq": 2, "deep": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    write(ledger, 3)
    assert seqs(FileLink(ledger.parent, ledger).records(0)) == [1, 3]


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(ledger: Path) -> None:
    folder = ledger.parent / "samples" / "r" / "step_4.r1"
    folder.mkdir(parents=True)
    (ledger.parent / ".evald").mkdir()
    for pipe in (ledger, folder / "a.jsonl", ledger.parent / ".evald" / "status.json"):
        os.mkfifo(pipe)
    link = FileLink(ledger.parent, ledger)
    assert link.status() is None
    assert link.records(0) == []
    assert link.samples("r/step/4/r1", "a") is None
    ledger.unlink()
    write(ledger, 1)
    assert seqs(link.records(0)) == [1]
    link.close()


# --- the samples --------------------------------------------------------------------------------


def test_samples_of_one_set(tmp_path: Path, ledger: Path) -> None:
    folder = tmp_path / "samples" / "r" / "step_4.r1"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"question": "q1"}\n{"question": "q2"}\n')
    (folder / "torn.jsonl").write_text('{"question"')
    link = FileLink(tmp_path, ledger)
    assert link.samples("r/step/4/r1", "a") == [{"question": "q1"}, {"question": "q2"}]
    for record_id, name in [
        ("r/step/4/r0", "a"),
        ("r/step/4/r1", "b"),
        ("r/step/4/r1", "torn"),
        ("r/step/4/r1", "../step_4.r1/a"),
        ("../r/step/4/r1", "a"),
        ("r/step/4/r1", ""),
        ("nonsense", "a"),
    ]:
        assert link.samples(record_id, name) is None
    assert FileLink(tmp_path).samples("r/step/4/r1", "a") is None


def test_samples_that_are_compressed_at_this_moment_are_found(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "samples" / "r" / "step_4.r1" / "a.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"question": "q1"}\n')

    def read_late(path: Path) -> bytes:
        if path == journal:
            compress(journal, Modes(), lambda: False)
        return read_small(path)

    monkeypatch.setattr(file_link, "read_small", read_late)
    assert FileLink(tmp_path, ledger).samples("r/step/4/r1", "a") == [{"question": "q1"}]


def test_nothing_is_written(tmp_path: Path) -> None:
    link = FileLink(tmp_path / "root", tmp_path / "results")
    link.status()
    link.records(0)
    link.samples("r/step/4/r1", "a")
    link.close()
    assert list(tmp_path.iterdir()) == []
