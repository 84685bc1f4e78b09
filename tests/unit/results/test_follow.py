import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evald.errors import LedgerError
from evald.results.follow import Cursor, Follower, read_records
from evald.status.pages import seq_of
from evald.trainer.links.file_link import FileLink

RECORD = (
    b'{"schema":1,"seq":1,"type":"alert","run":"a","step":0,"record_id":"x",'
    b'"name":"n","detail":"d"}'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def add(path: Path, content: bytes) -> None:
    with path.open("ab") as out:
        out.write(content)


def test_lines_come_once_and_whole(path: Path) -> None:
    with Follower(path) as follower:
        assert follower.read() == []  # no file yet
        add(path, b"one\ntw")
        assert follower.read() == [b"one"]
        assert follower.read() == []
        add(path, b"o\n\nthree\n")
        assert follower.read() == [b"two", b"", b"three"]
        assert follower.restarts == 0


def test_a_file_that_is_moved_away_is_read_to_its_end_first(path: Path) -> None:
    with Follower(path) as follower:
        add(path, b"1\n2\n")
        assert follower.read() == [b"1", b"2"]
        add(path, b"3\n")
        moved = path.rename(path.with_name("old"))
        assert follower.read() == [b"3"]
        add(moved, b"4\n")
        add(path, b"new 1\n")
        assert follower.read() == [b"4", b"new 1"]
        assert follower.restarts == 1


def test_a_truncated_file_is_read_from_its_start(path: Path) -> None:
    with Follower(path) as follower:
        add(path, b"1\n2\n")
        follower.read()
        path.write_bytes(b"")
        assert follower.read() == []
        add(path, b"again\n")
        assert follower.read() == [b"again"]
        path.write_bytes(b"another, longer than before\n")
        assert follower.read() == [b"another, longer than before"]
        assert follower.restarts == 2


def test_a_repaired_torn_tail_is_no_restart(path: Path) -> None:
    with Follower(path) as follower:
        add(path, b"1\n2\n{torn")
        follower.read()
        os.truncate(path, 4)
        add(path, b"3\n")
        assert follower.read() == [b"3"]
        assert follower.restarts == 0


def test_a_copy_of_the_ledger_that_grew_goes_on_where_it_was(path: Path) -> None:
    with Follower(path) as follower:
        add(path, b"1\n2\n")
        follower.read()
        fresh = path.with_name("fresh")
        shutil.copy(path, fresh)
        add(fresh, b"3\n")
        fresh.replace(path)  # as rsync does
        assert follower.read() == [b"3"]
        assert follower.restarts == 0


def test_a_cursor_goes_on_in_another_life(path: Path) -> None:
    add(path, b"1\n2\n")
    with Follower(path) as follower:
        follower.read()
    add(path, b"3\n")
    with Follower(path, follower.cursor) as follower:
        assert follower.read() == [b"3"]


@pytest.mark.parametrize(
    "cursor", [Cursor(0, 0, 2), Cursor(-1, -1, 3)], ids=["other file", "inside a line"]
)
def test_a_cursor_that_does_not_fit_reads_from_the_start(path: Path, cursor: Cursor) -> None:
    add(path, b"1\n22\n")
    if cursor.inode:
        status = path.stat()
        cursor = Cursor(status.st_dev, status.st_ino, cursor.offset)
    with Follower(path, cursor) as follower:
        assert follower.read() == [b"1", b"22"]
        assert follower.restarts == 1


def test_a_closed_follower_goes_on(path: Path) -> None:
    add(path, b"1\n")
    follower = Follower(path)
    follower.read()
    follower.close()
    follower.close()
    add(path, b"2\n")
    assert follower.read() == [b"2"]
    follower.close()


def test_a_file_that_vanishes_between_look_and_open_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, b"1\n")

    def gone(*_: object) -> int:
        raise FileNotFoundError

    with Follower(path) as follower:
        monkeypatch.setattr(os, "open", gone)
        assert follower.read() == []
        monkeypatch.undo()
        assert follower.read() == [b"1"]


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=6).map(lambda piece: piece.replace(b"x", b"\n"))),
    reads=st.sets(st.integers(0, 20)),
)
def test_however_it_was_written_every_whole_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], reads: set[int]
) -> None:
    path = tmp_path_factory.mktemp("f") / "f"
    lines = []
    with Follower(path) as follower:
        for number, piece in enumerate(pieces):
            add(path, piece)
            if number in reads:
                lines += follower.read()
        lines += follower.read()
    assert lines == b"".join(pieces).split(b"\n")[:-1]


def test_read_records_leaves_out_a_torn_tail_and_unknown_types(path: Path) -> None:
    assert read_records(path) == []
    add(path, RECORD + b'\n{"schema":1,"seq":2,"type":"future"}\n{"half')
    assert [record.record_id for record in read_records(path)] == ["x"]
    add(path, b"\n")
    assert [record.record_id for record in read_records(path)] == ["x"]
    add(path, RECORD + b"\n")
    with pytest.raises(LedgerError, match="line 3"):
        read_records(path)


def test_a_record_that_is_nested_too_deep_is_a_broken_line(path: Path) -> None:
    deep = b'{"schema":1,"seq":2,"type":"point","provenance":{"a":' + b"[" * 100_000
    add(path, RECORD + b"\n" + deep + b"\n")
    assert [record.record_id for record in read_records(path)] == ["x"]  # torn
    add(path, RECORD + b"\n")
    with pytest.raises(LedgerError, match="line 2: it is nested too deep"):
        read_records(path)
    assert seq_of(deep) is None
    link = FileLink(path.parent, path)
    assert [record["record_id"] for record in link.records(0)] == ["x", "x"]
    link.close()
