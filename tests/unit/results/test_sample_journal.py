import json
import os
import stat
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from evald.evals.stats.samples import read_samples
from evald.point import Kind, PointKey
from evald.results.modes import Modes
from evald.results.samples import FLUSH_BYTES, SampleJournal, SampleRecord, point_samples_dir
from evald.results.stored_samples import StoredSamples


def sample(number: int, status: str = "scored", **changes: object) -> SampleRecord:
    fields = {
        "question": "q",
        "sample": number,
        "digest": "d",
        "config": "c",
        "status": status,
        "score": 1.0,
        "response": "ünï\n",
        "reference": ["x", {"y": 1}],
    }
    return msgspec.convert(fields | changes, SampleRecord)


def lines(journal: SampleJournal) -> list[bytes]:
    return journal.path.read_bytes().splitlines() if journal.path.exists() else []


def test_where_samples_lie() -> None:
    root = Path("/r")
    assert point_samples_dir(root, PointKey("a", 40, 1)) == Path("/r/samples/a/step_40.r1")
    baseline = PointKey("a", -1, 0, Kind.BASELINE)
    assert point_samples_dir(root, baseline) == Path("/r/samples/a/baseline_-1.r0")


def test_scored_samples_of_the_same_weights_and_config_come_back(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path / "point", "set", file_mode=0o640)
    assert journal.load("d", "c") == {}
    kept = [sample(0), sample(1, score=0.0, truncated=True)]
    others = [sample(2, digest="e"), sample(3, config="e")]
    others += [sample(4, status) for status in ("error", "grader_error", "timeout")]
    for record in kept + others:
        journal.append(record)
    journal.close()
    loaded = journal.load("d", "c")
    assert {key: one.score for key, one in loaded.items()} == {("q", 0): 1.0, ("q", 1): 0.0}
    assert [one.truncated for one in loaded.values()] == [False, True]
    assert json.loads(lines(journal)[0])["response"] == "ünï\n"
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o640


def test_a_sample_that_was_done_again_replaces_the_first(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path, "set")
    for record in (sample(0, "error", score=None), sample(0, score=0.5), sample(0, score=1.0)):
        journal.append(record)
    journal.close()
    assert [record.score for record in journal.load("d", "c").values()] == [1.0]


def test_lines_wait_for_flush_for_size_or_for_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    journal = SampleJournal(tmp_path, "set")
    journal.flush()
    assert not journal.path.exists()
    journal.append(sample(0))
    assert lines(journal) == []
    journal.flush()
    assert len(lines(journal)) == 1
    journal.append(sample(1))
    now_s[0] += 1.0
    journal.append(sample(2))
    assert len(lines(journal)) == 3
    journal.append(sample(3, response="x" * FLUSH_BYTES))
    assert len(lines(journal)) == 4
    journal.append(sample(4))
    journal.close()
    assert len(lines(journal)) == 5
    journal.close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000), garbage=st.sampled_from([b"", b"\0\0", b'{"question":"']))
def test_a_torn_journal_gives_back_its_whole_lines_and_takes_more(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    directory = tmp_path_factory.mktemp("j")
    journal = SampleJournal(directory, "set")
    for number in range(5):
        journal.append(sample(number))
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:cut] + garbage)
    expected = whole[:cut].count(b"\n")
    if cut % 2:  # a journal that is appended to without a load is repaired, too
        assert len(journal.load("d", "c")) == expected
    journal.append(sample(9))
    journal.close()
    assert list(journal.load("d", "c"))[-1] == ("q", 9)
    assert len(lines(journal)) == expected + 1


def test_a_long_journal_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path, "set")
    for number in range(200):
        # longer than what is looked at in one step from the end
        journal.append(sample(number, response="x" * 100_000))
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"question": "' + b"y" * 300_000)
    whole_bytes = journal.path.stat().st_size
    tracemalloc.start()
    assert len(journal.load("d", "c")) == 200
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < whole_bytes / 20
    assert len(lines(journal)) == 200


def test_a_last_line_that_is_no_json_is_cut_and_one_in_the_middle_passed_by(
    tmp_path: Path,
) -> None:
    journal = SampleJournal(tmp_path, "set")
    journal.append(sample(0))
    journal.close()
    journal.path.write_bytes(b"garbage\n" + journal.path.read_bytes() + b"garbage\n")
    with capture_logs() as logs:
        assert list(journal.load("d", "c")) == [("q", 0)]
    assert len(lines(journal)) == 2
    assert [event["event"] for event in logs] == ["samples_torn_tail_cut", "sample_unreadable"]


DEEP = [b'{"x": ' + b"[" * 200_000, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"]


@pytest.mark.parametrize("deep", DEEP, ids=["torn", "whole"])
def test_a_line_that_is_nested_too_deep_is_one_that_cannot_be_read(
    tmp_path: Path, deep: bytes
) -> None:
    journal = SampleJournal(tmp_path, "set")
    journal.append(sample(0))
    journal.close()
    journal.path.write_bytes(deep + b"\n" + journal.path.read_bytes() + deep + b"\n")
    assert list(read_samples(journal.path, "d", "c")) == ["q"]
    stored = StoredSamples(journal.path, "d", "c", n_samples=1)
    assert stored.count() == 1
    assert [len(batch) for batch in stored.batches()] == [1]
    assert list(journal.load("d", "c")) == [("q", 0)]
    assert len(lines(journal)) == 2


def test_half_a_surrogate_pair_does_not_cost_the_sample(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path, "set")
    record = sample(0)
    record.response = "a\ud83d"
    journal.append(record)
    journal.close()
    assert json.loads(lines(journal)[0])["response"] == "a\\ud83d"
    assert list(journal.load("d", "c")) == [("q", 0)]


def test_a_failed_write_keeps_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SampleJournal(tmp_path, "set")
    write = os.write
    lengths = iter([10])

    def failing(descriptor: int, content: bytes) -> int:
        for length in lengths:
            return write(descriptor, content[:length])
        raise OSError("full")

    journal.append(sample(0))
    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match="full"):
        journal.flush()
    monkeypatch.undo()
    journal.append(sample(1))
    journal.close()
    assert len(journal.load("d", "c")) == 2


def test_held_lines_wait_for_flush_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SampleJournal(tmp_path, "set")
    monkeypatch.setattr("evald.results.samples.FLUSH_INTERVAL_S", 0.0)
    journal.hold(sample(0, response="x" * FLUSH_BYTES))
    assert not journal.path.exists()
    journal.flush()
    assert len(lines(journal)) == 1
    # ... unless they would fill the memory
    monkeypatch.setattr("evald.results.samples._HELD_BYTES", 2 * FLUSH_BYTES)
    journal.hold(sample(1, response="x" * FLUSH_BYTES))
    assert len(lines(journal)) == 1
    journal.hold(sample(2, response="x" * FLUSH_BYTES))
    assert len(lines(journal)) == 3


@pytest.mark.parametrize("fails", [False, True], ids=["slow", "slow, then full"])
def test_a_slow_disk_holds_nobody_up_who_only_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    journal = SampleJournal(tmp_path, "set")
    journal.hold(sample(0))
    write, began, goes_on = os.write, threading.Event(), threading.Event()

    def slow(descriptor: int, content: bytes) -> int:
        began.set()
        assert goes_on.wait(30)
        if fails:
            raise OSError("full")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", slow)
    with ThreadPoolExecutor(1) as threads:
        flushed = threads.submit(journal.flush)
        assert began.wait(30)
        journal.hold(sample(1))  # (it would never come back)
        goes_on.set()
        assert (flushed.exception() is not None) == fails
    monkeypatch.undo()
    journal.close()
    assert [json.loads(line)["sample"] for line in lines(journal)] == [0, 1]


def test_a_journal_that_cannot_be_read_is_not_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SampleJournal(tmp_path, "set")
    journal.append(sample(0))

    def broken(_path: Path, _mode: str) -> bytes:
        raise OSError("bad disk")

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(OSError, match="bad disk"):
        journal.close()
    monkeypatch.undo()
    journal.close()
    assert len(lines(journal)) == 1


def test_modes_rule_the_directories(tmp_path: Path) -> None:
    modes = Modes(dir_mode=0o770, file_mode=0o660)
    journal = SampleJournal(tmp_path / "samples" / "a", "set", modes=modes)
    journal.append(sample(0))
    journal.close()
    assert stat.S_IMODE((tmp_path / "samples").stat().st_mode) == 0o770
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o660
