"""A ledger in several files: closed by size, replayed, and followed without a gap."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ledger_cases import accepted, config, ended, file, set_done

from evald.config import Results
from evald.errors import LedgerError
from evald.results.follow import Cursor, Follower, read_records
from evald.results.history import History
from evald.results.ledger import Ledger
from evald.results.segments import closed_segments, segment_path
from evald.status.pages import RecordPages
from evald.trainer.links.file_link import FileLink


def small(directory: Path, size_bytes: int = 700) -> Results:
    return config(directory, rotate_mb=size_bytes / (1 << 20))


async def grow(directory: Path, steps: range) -> None:
    ledger = Ledger.open(small(directory))
    for step in steps:
        for record in (accepted(step), set_done(step), ended(step)):
            await ledger.append(record)
    ledger.close()


def seqs(lines: list[bytes]) -> list[int]:
    return [msgspec.json.decode(line)["seq"] for line in lines]


async def test_a_large_file_is_closed_between_two_records_and_seq_goes_on(tmp_path: Path) -> None:
    await grow(tmp_path, range(5))
    await grow(tmp_path, range(5, 9))
    closed = closed_segments(file(tmp_path))
    assert len(closed) > 3
    assert [one.first for one in closed] == [1, *(one.last + 1 for one in closed[:-1])]
    for one in closed:
        lines = one.path.read_bytes().splitlines()
        assert seqs(lines) == list(range(one.first, one.last + 1))
        assert one.path.stat().st_size >= 700
        assert one.path.name == f"results.{one.first:09}-{one.last:09}.jsonl"
    assert [record.seq for record in read_records(file(tmp_path))] == list(range(1, 28))
    ledger = Ledger.open(small(tmp_path))
    ledger.close()
    assert ledger.last_seq == 27
    assert len(ledger.index.ended_points()) == 9


async def test_0_never_closes_a_file(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path, rotate_mb=0))
    for step in range(20):
        await ledger.append(ended(step))
    ledger.close()
    assert closed_segments(file(tmp_path)) == []


@pytest.mark.parametrize("begun", [False, True], ids=["no file yet", "an empty file"])
async def test_a_daemon_killed_in_the_middle_of_a_rotation_goes_on(
    tmp_path: Path, *, begun: bool
) -> None:
    await grow(tmp_path, range(1))
    path = file(tmp_path)
    for one in closed_segments(path):
        one.path.unlink()
    content = b"".join(
        msgspec.json.encode(ended(step)).replace(b'"seq":0', b'"seq":%d' % (step + 1)) + b"\n"
        for step in range(3)
    )
    path.write_bytes(content)
    path.rename(segment_path(path, 1, 3))
    if begun:
        path.touch()
    assert len(read_records(path)) == 3  # readers need not wait for the repair
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(ended(7))
    ledger.close()
    assert [record.seq for record in read_records(path)] == [1, 2, 3, 4]
    assert seqs(path.read_bytes().splitlines()) == [4]


async def test_a_rotation_that_fails_is_tried_again_with_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evald.results.pause.LOOK_AGAIN_S", 0.01)
    ledger = Ledger.open(small(tmp_path, 100))
    await ledger.append(ended(1))
    failed: list[bool] = []
    real = os.open

    def full(path: Path, *arguments: int) -> int:
        if len(failed) < 2 and path == file(tmp_path):
            failed.append(path.exists())
            raise OSError(28, "No space left on device")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", full)
    await ledger.append(ended(2))
    ledger.close()
    assert failed == [False, False]  # (the old file was closed, the new one could not be made)
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2]


async def test_a_broken_closed_file_and_a_gap_are_named(tmp_path: Path) -> None:
    await grow(tmp_path, range(6))
    first, second, third, *_ = closed_segments(file(tmp_path))
    content = second.path.read_bytes()
    named = rf"cannot read ledger {second.path}: line \d+"
    for cut in (content[:-5], content[:-5] + b"\n"):
        second.path.write_bytes(cut)
        with pytest.raises(LedgerError, match=named):
            Ledger.open(small(tmp_path))
    with pytest.raises(LedgerError, match=named):
        read_records(file(tmp_path))
    second.path.unlink()
    gone = f"{third.path.name}: the closed file with seq {second.first} to {second.last} is not"
    with pytest.raises(LedgerError, match=gone):
        Ledger.open(small(tmp_path))
    first.path.unlink()  # the oldest ones may be archived
    ledger = Ledger.open(small(tmp_path))
    ledger.close()
    assert ledger.last_seq == 18


async def test_a_clock_that_jumps_back_disturbs_nobody(tmp_path: Path) -> None:
    for life, epoch in enumerate((2e9, 1e9)):
        ledger = Ledger.open(small(tmp_path), wall=iter(range(int(epoch), 0, -1000)).__next__)
        for step in range(4 * life, 4 * life + 4):
            for record in (accepted(step), ended(step)):
                await ledger.append(record)
        ledger.close()
    records = read_records(file(tmp_path))
    assert [record.seq for record in records] == list(range(1, 17))
    times = [record.time for record in records]
    assert times == sorted(times, reverse=True)
    with Follower(file(tmp_path), after=9) as follower:
        assert seqs(follower.read())[-7:] == list(range(10, 17))
    assert [state.key.step for state in ledger.index.ended_points()] == list(range(8))


# --- readers


@pytest.fixture
async def grown(tmp_path: Path) -> Path:
    await grow(tmp_path, range(6))
    return file(tmp_path)


async def test_a_follower_misses_nothing_however_seldom_it_looks(tmp_path: Path) -> None:
    for pace in (1, 2, 5, 11):
        directory = tmp_path / str(pace)
        ledger = Ledger.open(small(directory, 300))
        seen = []
        with Follower(file(directory)) as follower:
            for step in range(24):
                await ledger.append(ended(step))
                if step % pace == 0:
                    seen += seqs(follower.read())
            seen += seqs(follower.read())
            assert follower.restarts == 0
        ledger.close()
        assert seen == list(range(1, 25))


def test_every_cursor_goes_on_where_it_was(grown: Path) -> None:
    paths = [one.path for one in closed_segments(grown)] + [grown]
    number = 0
    for path in paths:
        status = path.stat()
        offset = 0
        for line in path.read_bytes().splitlines(keepends=True):
            number += 1
            offset += len(line)
            with Follower(grown, Cursor(status.st_dev, status.st_ino, offset)) as follower:
                assert seqs(follower.read()) == list(range(number + 1, 19))
                assert follower.restarts == 0
    assert number == 18


def test_a_cursor_in_a_new_and_empty_file_goes_on_there(grown: Path) -> None:
    grown.rename(segment_path(grown, 17, 18))
    grown.touch()
    with Follower(grown) as follower:
        assert seqs(follower.read()) == list(range(1, 19))
        cursor = follower.cursor
    with Follower(grown, cursor) as follower:
        assert follower.read() == []
        grown.write_bytes(b'{"seq":19}\n')
        assert seqs(follower.read()) == [19]
    grown.rename(segment_path(grown, 19, 19))
    grown.write_bytes(b'{"seq":20}\n')
    with Follower(grown, cursor) as follower:
        assert seqs(follower.read()) == [19, 20]
        assert follower.restarts == 0


def test_a_seq_passes_closed_files_by(grown: Path) -> None:
    first, second, *_ = closed_segments(grown)
    with Follower(grown, after=second.last) as follower:
        assert seqs(follower.read())[0] == second.last + 1
    with Follower(grown, after=first.last - 1) as follower:
        assert seqs(follower.read())[0] == 1
    with Follower(grown, after=99) as follower:
        assert follower.read() == seqs_file(grown)


def seqs_file(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_a_ledger_that_is_rotated_while_it_is_opened_is_read_in_order(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    rotated: list[Path] = []

    def rotate_first(path: Path, *arguments: int) -> int:
        if path == grown and not rotated:
            rotated.append(grown.rename(segment_path(grown, 99, 99)))
            grown.write_bytes(b'{"seq":100}\n')
        return real(path, *arguments)

    last = seqs_file(grown)
    with Follower(grown) as follower:
        monkeypatch.setattr(os, "open", rotate_first)
        seen = follower.read()
        seen += follower.read()
    assert rotated
    assert seen[-1 - len(last) :] == [*last, b'{"seq":100}']
    assert len(seen) == 19
    assert follower.restarts == 0


def test_copies_of_the_files_go_on_where_the_originals_were(grown: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "results.jsonl"
    copy.parent.mkdir()
    *older, newest = closed_segments(grown)
    for one in older:
        (copy.parent / one.path.name).write_bytes(one.path.read_bytes())
    copy.write_bytes(newest.path.read_bytes()[:300])
    with Follower(copy) as follower:
        seen = follower.read()
        for path in (newest.path, grown):  # as rsync does: each file anew
            fresh = copy.parent / ".fresh"
            fresh.write_bytes(path.read_bytes())
            fresh.rename(copy.parent / path.name)
        seen += follower.read()
    assert seqs(seen) == list(range(1, 19))
    assert follower.restarts == 0


def test_pages_links_and_history_read_all_files(grown: Path) -> None:
    pages = RecordPages(grown)
    for after in range(19):
        assert seqs(pages.page(after, 4).splitlines()) == list(range(after + 1, 19))[:4]
    link = FileLink(grown.parent, grown)
    for after in (5, 2):
        asked = after
        told = []
        while records := link.records(asked):
            told += [record["seq"] for record in records]
            asked = told[-1]
        assert told == list(range(after + 1, 19))
    link.close()
    history = History(grown, "a")
    points = history.points()
    grown.rename(segment_path(grown, 99, 99))  # closed between looking and reading
    grown.touch()
    assert [one.key.step for one in points] == list(range(6))
    for one in points:
        record, sets = history.read(one)
        assert (record.step, list(sets)) == (one.key.step, ["x"])


def files(path: Path) -> Iterator[Path]:
    yield from path.parent.glob("results.*jsonl")


def test_another_ledger_in_the_place_of_this_one_is_read_from_its_first_file(grown: Path) -> None:
    with Follower(grown) as follower:
        follower.read()
        for path in list(files(grown)):
            path.unlink()
        segment_path(grown, 1, 1).write_bytes(b'{"seq":1}\n')
        grown.write_bytes(b'{"seq":2}\n')
        assert seqs(follower.read()) == [1, 2]
        assert follower.restarts == 1


async def test_a_copy_that_gets_a_closed_file_late_is_read_without_a_gap(tmp_path: Path) -> None:
    await grow(tmp_path / "node", range(5))
    paths = [one.path for one in closed_segments(file(tmp_path / "node"))]
    path = file(tmp_path / "copy")

    def put(name: str, content: bytes) -> None:
        fresh = path.with_name(".fresh")
        fresh.write_bytes(content)
        fresh.rename(path.with_name(name))

    path.parent.mkdir(parents=True)
    put(path.name, b"".join(paths[0].read_bytes().splitlines(keepends=True)[:2]))
    with Follower(path) as follower:
        assert seqs(follower.read()) == [1, 2]
        # the node closed files after the names had been listed: only its newest one is copied
        put(path.name, file(tmp_path / "node").read_bytes())
        read = seqs(follower.read())
        for one in paths:
            put(one.name, one.read_bytes())
        put(path.name, file(tmp_path / "node").read_bytes())
        for _ in range(3):
            read += seqs(follower.read())
    assert set(read) == set(range(1, 16))


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
async def test_seq_goes_on_when_all_files_are_gone(tmp_path: Path, left: str) -> None:
    await grow(tmp_path, range(5))
    with Follower(file(tmp_path)) as follower:
        assert seqs(follower.read()) == list(range(1, 16))
        for path in file(tmp_path).parent.glob("results*.jsonl"):
            path.unlink()
        if left == "an empty file":
            file(tmp_path).touch()
        await grow(tmp_path, range(5, 6))
        assert seqs(follower.read()) == [16, 17, 18]
    ledger = Ledger.open(small(tmp_path))
    ledger.close()
    assert ledger.last_seq == 18


async def test_the_mark_follows_the_files_and_never_leads_them(tmp_path: Path) -> None:
    await grow(tmp_path, range(2))
    lock = file(tmp_path).with_name("results.lock")
    copied = lock.read_bytes()
    assert copied.split() == [str(os.getpid()).encode(), b"6"]
    file(tmp_path).with_name("results.lock").write_bytes(copied.replace(b"6 ", b"9 "))
    await grow(tmp_path, range(2, 3))
    assert [record.seq for record in read_records(file(tmp_path))] == list(range(1, 10))
    lock.write_bytes(b"4711\n")  # an earlier version's
    await grow(tmp_path, range(3, 4))
    assert lock.read_bytes().split() == [str(os.getpid()).encode(), b"12"]
    lock.unlink()
    for path in file(tmp_path).parent.glob("results*.jsonl"):
        path.unlink()
    await grow(tmp_path, range(1))
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2, 3]
