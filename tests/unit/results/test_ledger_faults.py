"""What a crash leaves behind, disks that fail, and appends that are cancelled."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import accepted, config, ended, file, fill, set_done
from structlog.testing import capture_logs

from evald.errors import LedgerError
from evald.point import PointKey
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.pause import Pause
from evald.results.records import Alert, RunEnd

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
    # with nothing left seq goes on from what readers have seen
    before = kept.count(b"\n") or whole.count(b"\n")
    assert ledger.last_seq == before
    asyncio.run(ledger.append(Alert(run="a", step=0, record_id="a/x", name="n", detail="d")))
    ledger.close()
    records = read_records(file(directory))
    assert records[-1].seq == before + 1
    assert [record.seq - records[0].seq for record in records] == list(range(len(records)))
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


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evald.results.pause.LOOK_AGAIN_S", 0.01)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
async def test_a_record_waits_until_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pause = Pause()
    ledger = Ledger.open(config(tmp_path), pause=pause)
    await ledger.append(accepted(1))
    before = file(tmp_path).read_bytes()
    write = os.write
    tried = []

    def broken(descriptor: int, line: bytes) -> int:
        tried.append(line)
        if len(tried) % 2:
            return write(descriptor, line[:10])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as fault:
        fault.setattr(os, "write", broken)
        appending = asyncio.create_task(ledger.append(ended(1)))
        behind = asyncio.create_task(ledger.append(accepted(2)))
        await until(lambda: len(tried) > 4)
        assert file(tmp_path).read_bytes() in {before, before + tried[0][:10]}
        assert pause.why.startswith(f"cannot write {file(tmp_path)}: ")
        assert ledger.last_seq == 1
        assert len(ledger.index.ended_points()) == 0
    await appending
    await behind
    ledger.close()
    assert pause.why == ""
    assert pause.total_s > 0.02
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2, 3]
    assert len(set(tried)) == 1  # not even the time differs


async def test_a_ledger_is_taken_over_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    ledger = Ledger.open(config(tmp_path))
    assert ledger.last_seq == 6
    with pytest.raises(LedgerError, match="another evald"):
        Ledger.open(config(tmp_path))
    ledger.close()


@pytest.mark.usefixtures("_soon")
async def test_a_line_that_the_disk_did_not_confirm_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Pause()
    ledger = Ledger.open(config(tmp_path), pause=pause)
    sync, sizes = os.fdatasync, []

    def broken(descriptor: int) -> None:
        sizes.append(file(tmp_path).stat().st_size)
        if len(sizes) < 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", broken)
    await ledger.append(accepted(1))
    await ledger.append(accepted(2))
    ledger.close()
    assert sizes[0] == sizes[1] == sizes[2]  # taken away in between
    assert [record.seq for record in read_records(file(tmp_path))] == [1, 2]


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("foreign", [b"", b"somebody else's\n"])
async def test_what_a_failed_write_left_is_removed_later_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bytes
) -> None:
    pause = Pause()
    ledger = Ledger.open(config(tmp_path), pause=pause)
    await ledger.append(accepted(1))
    before = file(tmp_path).read_bytes()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as fault:
        fault.setattr(os, "fdatasync", broken)
        fault.setattr(os, "ftruncate", broken)
        appending = asyncio.create_task(ledger.append(ended(1)))
        await until(lambda: pause.why)
        left = file(tmp_path).read_bytes()
        assert left.startswith(before)
        assert len(left) > len(before)  # the whole line is there, and counts for nobody
        with file(tmp_path).open("ab") as out:
            out.write(foreign)
    if foreign:
        with pytest.raises(LedgerError, match="its end is not what evald has written"):
            await appending
        assert file(tmp_path).read_bytes() == left + foreign
    else:
        await appending
        assert file(tmp_path).read_bytes() == left
    ledger.close()
    assert pause.why == ""


@pytest.mark.usefixtures("_soon")
async def test_a_cancelled_wait_for_room_leaves_nothing_and_ends_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Pause()
    ledger = Ledger.open(config(tmp_path), pause=pause)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as fault:
        fault.setattr(os, "write", full)
        appending = asyncio.create_task(ledger.append(ended(1)))
        await until(lambda: pause.why)
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
    assert pause.why == ""
    await ledger.append(accepted(2))
    ledger.close()
    assert [record.step for record in read_records(file(tmp_path))] == [2]


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
    with pytest.raises(LedgerError, match=r"replaced by another one|was moved away"):
        await ledger.append(ended(1))
    ledger.close()
    assert (tmp_path / "moved").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("change", [-9, 9])
async def test_a_ledger_that_was_cut_or_written_to_is_noticed(tmp_path: Path, change: int) -> None:
    ledger = Ledger.open(config(tmp_path))
    await ledger.append(accepted(1))
    await ledger.append(accepted(2))
    whole = file(tmp_path).read_bytes()
    file(tmp_path).write_bytes(whole[:change] if change < 0 else whole + b"x" * change)
    with pytest.raises(LedgerError, match="somebody else has cut it or written to it"):
        await ledger.append(ended(1))  # behind half a line it would be lost
    ledger.close()
    again = Ledger.open(config(tmp_path))
    await again.append(ended(1))
    again.close()
    assert [record.step for record in read_records(file(tmp_path))][-1] == 1


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
    file(tmp_path).unlink()
    with capture_logs() as logs:
        task = asyncio.create_task(ledger.append(ended(1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    ledger.close()
    assert [event["event"] for event in logs] == ["ledger_append_failed"]
    assert "was moved away" in str(logs[0]["exc_info"])


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
