import asyncio
import errno
import fcntl
import grp
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from evald.config import Results
from evald.errors import LedgerError
from evald.point import Outcome, PointKey
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.records import Accepted, Alert, AnyRecord, Counts, PointRecord, RunEnd, SetRecord


def accepted(step: int) -> Accepted:
    return Accepted(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0/accepted",
        directory="/d",
        size_bytes=1,
        fingerprint="f",
    )


def ended(step: int, **metrics: float) -> PointRecord:
    return PointRecord(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0",
        outcome=Outcome.OK,
        detail='quotes " and\nnewlines and ünïcode',
        metrics=metrics,
    )


def set_done(step: int) -> SetRecord:
    return SetRecord(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0/x",
        set="x",
        counts=Counts(n_total=1),
        seconds=0.5,
        metrics={},
    )


def config(directory: Path, **changes: str) -> Results:
    return Results(dir=str(directory / "results"), **changes)


def file(directory: Path) -> Path:
    return directory / "results" / "results.jsonl"


async def fill(directory: Path, steps: int = 2) -> bytes:
    ledger = Ledger.open(config(directory), wall=lambda: 1.5)
    for step in range(steps):
        await ledger.append(accepted(step))
        await ledger.append(set_done(step))
        await ledger.append(ended(step))
    ledger.close()
    return file(directory).read_bytes()


async def test_records_get_seq_and_time_and_come_back_after_a_restart(tmp_path: Path) -> None:
    await fill(tmp_path, 2)
    ledger = Ledger.open(config(tmp_path), wall=lambda: 2.5)
    assert ledger.last_seq == 6
    await ledger.append(RunEnd(run="a", step=1, record_id="a/run_end", points={"ok": 2}))
    await ledger.append(Alert(run="a", step=0, record_id="a/alert", name="n", detail="d"))
    ledger.close()
    records = read_records(file(tmp_path))
    assert [record.seq for record in records] == list(range(1, 9))
    assert [record.time for record in records] == [1.5] * 6 + [2.5] * 2
    assert ledger.index.run_ended("a")
    assert ledger.index.outcome_counts()["ok"] == 2


async def test_the_index_after_replay_equals_the_one_that_grew(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    for record in (accepted(1), set_done(1), ended(1), accepted(2)):
        await ledger.append(record)
    ledger.close()
    again = Ledger.open(config(tmp_path))
    again.close()
    assert again.index.ended_points() == ledger.index.ended_points()
    assert again.index.open_points() == ledger.index.open_points()


async def test_concurrent_appends_are_whole_lines_in_seq_order(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    await asyncio.gather(*(ledger.append(accepted(step)) for step in range(50)))
    ledger.close()
    assert [record.seq for record in read_records(file(tmp_path))] == list(range(1, 51))


@pytest.mark.parametrize("make", [accepted, ended, set_done])
async def test_an_ended_point_takes_nothing_more(
    tmp_path: Path, make: Callable[[int], AnyRecord]
) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(ended(1))
    with pytest.raises(LedgerError, match=r"a:step:1\.r0 has already ended ok with seq 1"):
        await ledger.append(make(1))
    await ledger.append(accepted(2))
    ledger.close()
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2]


async def test_an_open_point_may_be_accepted_again(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(accepted(1))
    await ledger.append(accepted(1))
    ledger.close()
    assert ledger.last_seq == 2


async def test_a_record_that_cannot_be_read_back_is_refused(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    with pytest.raises(LedgerError, match="cannot be read back"):
        await ledger.append(ended(1, score=float("nan")))
    await ledger.append(ended(1, score=1.0))
    ledger.close()
    assert ledger.last_seq == 1


async def test_text_that_utf8_cannot_hold_is_escaped(tmp_path: Path) -> None:
    """A file's name need not be UTF-8; the record of its snapshot is written all the same."""
    ledger = Ledger.open(config(tmp_path))
    record = ended(1)
    record.detail = "a\udcff is a stray weights file"
    await ledger.append(record)
    ledger.close()
    again = Ledger.open(config(tmp_path))
    again.close()
    assert rb"a\\udcff is a stray" in file(tmp_path).read_bytes()
    assert again.last_seq == 1


async def test_a_second_ledger_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    with pytest.raises(LedgerError, match=rf"another evald \(pid {os.getpid()}\)"):
        Ledger.open(config(tmp_path))
    await ledger.append(accepted(1))
    ledger.close()
    Ledger.open(config(tmp_path)).close()


async def test_after_close_nothing_is_appended(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="the ledger is closed"):
        await ledger.append(accepted(1))


# --- what a crash leaves behind


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_truncation_recovers_to_a_prefix_and_goes_on(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    whole = asyncio.run(fill(directory))
    cut = data.draw(st.integers(0, len(whole)))
    garbage = data.draw(st.sampled_from([b"", b"\0" * 40, b'{"type":', b"\xff\xfe", b"x\n"]))
    if garbage.endswith(b"\n") and not whole[:cut].endswith(b"\n"):
        garbage = b""  # two broken lines at the end are more than a torn tail
    file(directory).write_bytes(whole[:cut] + garbage)
    kept = whole[: whole[:cut].rfind(b"\n") + 1]

    ledger = Ledger.open(config(directory))
    assert file(directory).read_bytes() == kept
    assert ledger.last_seq == kept.count(b"\n")
    asyncio.run(ledger.append(Alert(run="a", step=0, record_id="a/x", name="n", detail="d")))
    ledger.close()
    records = read_records(file(directory))
    assert [record.seq for record in records] == list(range(1, ledger.last_seq + 1))
    torn = directory / "results" / "results.torn"
    lost = whole[len(kept) : cut] + garbage
    assert (torn.read_bytes() if torn.exists() else b"").rstrip(b"\n") == lost.rstrip(b"\n")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"{torn", "line 2: JSON is malformed"),
        (b"", "line 2: Input data was truncated"),
        (b'{"schema":1,"seq":2}', "line 2: Object missing required field `type`"),
        (b'{"schema":2,"seq":2,"type":"point"}', "line 2: it has schema 2, this evald reads 1"),
        (b'{"schema":1,"seq":9,"type":"future"}', "line 2 has seq 9 where 2 must follow"),
    ],
)
async def test_a_broken_line_in_the_middle_is_named(
    tmp_path: Path, line: bytes, cause: str
) -> None:
    lines = (await fill(tmp_path)).split(b"\n")
    lines[1] = line
    broken = b"\n".join(lines)
    file(tmp_path).write_bytes(broken)
    for _ in range(2):  # the lock is free again after the failure
        with pytest.raises(LedgerError, match=f"{cause}.*; repair that line, or move the file"):
            Ledger.open(config(tmp_path))
    assert file(tmp_path).read_bytes() == broken


async def test_a_last_line_of_json_that_is_no_record_is_not_torn(tmp_path: Path) -> None:
    whole = await fill(tmp_path)
    file(tmp_path).write_bytes(whole + b'{"schema":1,"seq":7,"type":"point"}\n')
    with pytest.raises(LedgerError, match="line 7: Object missing required field"):
        Ledger.open(config(tmp_path))


async def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    first, *_ = (await fill(tmp_path)).split(b"\n")
    more = msgspec.json.decode(first) | {"surprise": [1]}
    lines = [msgspec.json.encode(more), b'{"schema":1,"seq":2,"type":"future","x":{}}']
    file(tmp_path).write_bytes(b"\n".join(lines) + b"\n")
    ledger = Ledger.open(config(tmp_path))
    ledger.close()
    assert ledger.last_seq == 2
    assert len(ledger.index.open_points()) == 1
    assert len(read_records(file(tmp_path))) == 1


async def test_a_ledger_whose_head_was_cut_off_by_a_person_goes_on(tmp_path: Path) -> None:
    lines = (await fill(tmp_path)).splitlines(keepends=True)
    file(tmp_path).write_bytes(b"".join(lines[3:]))
    ledger = Ledger.open(config(tmp_path))
    ledger.close()
    assert ledger.last_seq == 6


async def test_two_terminal_records_in_a_file_are_read_the_last_one_wins(tmp_path: Path) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(ended(1))
    ledger.close()
    again = msgspec.json.decode(file(tmp_path).read_bytes()) | {"seq": 2, "outcome": "partial"}
    with file(tmp_path).open("ab") as out:
        out.write(msgspec.json.encode(again) + b"\n")
    ledger = Ledger.open(config(tmp_path))
    ledger.close()
    assert ledger.index.outcome_counts() == {"ok": 0, "partial": 1, "skipped": 0}


# --- disks that fail


async def test_a_failed_write_is_undone_and_the_ledger_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(accepted(1))
    before = file(tmp_path).read_bytes()
    write = os.write

    def short(descriptor: int, line: bytes) -> int:
        return write(descriptor, line[:10])

    def full(_descriptor: int, _line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for broken in (short, full):
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(LedgerError, match=r"No space left on device; nothing was written"):
            await ledger.append(ended(1))
        monkeypatch.undo()
        assert file(tmp_path).read_bytes() == before
    await ledger.append(ended(1))
    ledger.close()
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2]


async def test_a_write_that_the_disk_did_not_confirm_stops_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(config(tmp_path))

    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(LedgerError, match="Input/output error; the newest line is in doubt"):
        await ledger.append(accepted(1))
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="in doubt"):
        await ledger.append(accepted(2))
    ledger.close()
    assert Ledger.open(config(tmp_path)).last_seq == 1


async def test_only_records_that_a_reader_relies_on_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    ledger = Ledger.open(config(tmp_path))
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: synced.append(ledger.last_seq + 1))
    for record in (accepted(1), set_done(1), ended(1)):
        await ledger.append(record)
    await ledger.append(Alert(run="a", step=0, record_id="a/x", name="n", detail="d"))
    await ledger.append(RunEnd(run="a", step=1, record_id="a/run_end", points={}))
    ledger.close()
    assert synced == [1, 3, 5]


@pytest.mark.parametrize("replace", [False, True])
async def test_a_ledger_that_was_moved_away_is_noticed(tmp_path: Path, *, replace: bool) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(accepted(1))
    file(tmp_path).rename(tmp_path / "moved")
    if replace:
        file(tmp_path).touch()
    with pytest.raises(LedgerError, match=r"replaced by another one|No such file"):
        await ledger.append(ended(1))
    ledger.close()
    assert (tmp_path / "moved").read_bytes().count(b"\n") == 1


# --- cancellation


async def slow_append(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[None], threading.Event]:
    """Begin an append whose disk confirms only after the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_descriptor: int) -> None:
        begun.set()
        go_on.wait(10)

    monkeypatch.setattr(os, "fdatasync", wait)
    task = asyncio.create_task(ledger.append(accepted(1)))
    await asyncio.to_thread(begun.wait, 10)
    return task, go_on


async def test_cancellation_waits_for_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(config(tmp_path))
    task, go_on = await slow_append(ledger, monkeypatch)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.last_seq == 1
    assert ledger.index.get(PointKey("a", 1)) is not None
    await ledger.append(ended(1))
    ledger.close()


async def test_a_write_that_fails_after_cancellation_is_told(
    tmp_path: Path,
) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(ended(1))
    with capture_logs() as logs:
        task = asyncio.create_task(ledger.append(ended(1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    ledger.close()
    assert [event["event"] for event in logs] == ["ledger_append_failed"]
    assert "has already ended" in str(logs[0]["exc_info"])


async def test_a_write_whose_task_was_killed_leaves_the_ledger_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(config(tmp_path))
    task, go_on = await slow_append(ledger, monkeypatch)
    (commit,) = (one for one in asyncio.all_tasks() if one.get_name() == "ledger-append")
    commit.cancel()  # what asyncio.run() does with every task that is left
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(LedgerError, match="in doubt"):
        await ledger.append(ended(1))
    closing = asyncio.create_task(asyncio.to_thread(ledger.close))
    await asyncio.sleep(0.05)
    assert not closing.done()  # the thread still uses the file
    go_on.set()
    await closing
    assert len(read_records(file(tmp_path))) == 1


# --- modes


def test_another_owners_file_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger.open(config(tmp_path)).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    Ledger.open(config(tmp_path, file_mode="0600")).close()
    assert mode(file(tmp_path)) == 0o644


def test_a_lock_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(LedgerError, match=r"cannot open ledger .*No locks available"):
        Ledger.open(config(tmp_path))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        Ledger.open(
            Results(dir=str(tmp_path / "x" / "y"), dir_mode="2775", file_mode="0664")
        ).close()
    finally:
        os.umask(before)
    for directory in (tmp_path / "x", tmp_path / "x" / "y"):
        assert mode(directory) == 0o2775
    for name in ("results.jsonl", "results.lock"):
        assert mode(tmp_path / "x" / "y" / name) == 0o664


def test_an_existing_directory_keeps_its_mode_and_our_files_get_the_new_one(tmp_path: Path) -> None:
    directory = tmp_path / "results"
    directory.mkdir(mode=0o700)
    Ledger.open(config(tmp_path)).close()
    Ledger.open(config(tmp_path, file_mode="0640")).close()
    assert mode(directory) == 0o700
    assert mode(file(tmp_path)) == 0o640


def test_a_group_that_exists_is_applied_and_one_that_does_not_is_an_error(tmp_path: Path) -> None:
    own = grp.getgrgid(os.getegid())
    Ledger.open(config(tmp_path, group=own.gr_name)).close()
    assert file(tmp_path).stat().st_gid == own.gr_gid
    with pytest.raises(LedgerError, match="there is no such group; create it or change"):
        Ledger.open(config(tmp_path, group="no-such-group"))


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(LedgerError, match=r"cannot open ledger .*; results\.dir must be"):
        Ledger.open(config(tmp_path))
