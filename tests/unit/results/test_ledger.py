"""The ledger as it should be: records in order, one writer, modes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import grp
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import accepted, config, ended, file, fill, set_done

from evald.config import Results
from evald.errors import LedgerError
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.records import Alert, AnyRecord, RunEnd


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
