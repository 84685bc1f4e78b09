"""What a crash leaves behind, disks that fail, and appends that are cancelled."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
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
