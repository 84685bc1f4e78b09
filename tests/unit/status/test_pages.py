"""Pages of the ledger: what is read, what is remembered, and what a replaced file does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evald.status import pages
from evald.status.pages import RecordPages, seq_of


def line(seq: int, padding: str = "") -> bytes:
    return json.dumps({"schema": 1, "seq": seq, "padding": padding}).encode() + b"\n"


def write(path: Path, first: int, last: int) -> None:
    with path.open("ab") as ledger:
        ledger.writelines(line(seq) for seq in range(first, last + 1))


def seqs(page: bytes) -> list[int | None]:
    assert page == b"" or page.endswith(b"\n")
    return [seq_of(one) for one in page.splitlines()]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_every_page_is_what_was_asked_for(ledger: Path) -> None:
    reader = RecordPages(ledger)
    assert reader.page(0, 10) == b""
    write(ledger, 1, 1000)
    for after, limit in (
        (0, 3),
        (63, 2),
        (64, 2),
        (65, 200),
        (127, 1),
        (998, 10),
        (1000, 5),
        (9, 0),
    ):
        expected = list(range(after + 1, min(after + limit, 1000) + 1))
        assert seqs(reader.page(after, limit)) == expected, (after, limit)
    write(ledger, 1001, 1100)
    assert seqs(reader.page(1098, 10)) == [1099, 1100]
    assert seqs(reader.page(5000, 10)) == []


def test_only_a_part_of_the_file_is_read_again(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ledger, 1, 2000)
    reader = RecordPages(ledger)
    reader.page(0, 1)
    decoded: list[bytes] = []

    def counting(one: bytes) -> int | None:
        decoded.append(one)
        return seq_of(one)

    monkeypatch.setattr(pages, "seq_of", counting)
    write(ledger, 2001, 2001)
    assert seqs(reader.page(1999, 1000)) == [2000, 2001]
    assert len(decoded) <= pages.STRIDE + 2


def test_memory_is_bounded(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STRIDE", 1)
    monkeypatch.setattr(pages, "MAX_MARKS", 8)
    write(ledger, 1, 300)
    reader = RecordPages(ledger)
    for after in range(0, 300, 7):
        assert seqs(reader.page(after, 2)) == [after + 1, min(after + 2, 300)][: 300 - after]
    write(ledger, 301, 700)
    assert seqs(reader.page(650, 2)) == [651, 652]
    assert len(reader._marks) <= 8
    assert reader._stride >= 64


def test_a_half_written_line_waits_until_it_is_whole(ledger: Path) -> None:
    whole = line(2)
    ledger.write_bytes(line(1) + whole[:9])
    reader = RecordPages(ledger)
    assert seqs(reader.page(0, 9)) == [1]
    with ledger.open("ab") as out:
        out.write(whole[9:])
    assert seqs(reader.page(0, 9)) == [1, 2]


def test_what_is_no_record_is_left_out(ledger: Path) -> None:
    ledger.write_bytes(b"no json\n" + line(1) + b'{"schema": 1}\n' + line(2) + b"[]\n")
    reader = RecordPages(ledger)
    assert reader.page(0, 9) == line(1) + line(2)


def test_a_replaced_or_shortened_ledger_is_read_from_its_start(ledger: Path) -> None:
    ledger.write_bytes(b"".join(line(seq, "longer" * 9) for seq in range(1, 501)))
    reader = RecordPages(ledger)
    assert seqs(reader.page(490, 2)) == [491, 492]
    fresh = ledger.with_name("fresh")
    write(fresh, 1, 3000)
    assert fresh.stat().st_size > ledger.stat().st_size
    fresh.replace(ledger)
    assert seqs(reader.page(490, 2)) == [491, 492]
    write(fresh, 1, 40)
    fresh.replace(ledger)
    assert seqs(reader.page(38, 9)) == [39, 40]
    os.truncate(ledger, len(line(1)) * 2)
    assert seqs(reader.page(0, 9)) == [1, 2]


def test_a_page_of_many_bytes_is_cut_short(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 1000)
    with ledger.open("wb") as out:
        out.writelines(line(seq, "x" * 400) for seq in range(1, 10))
    reader = RecordPages(ledger)
    first = seqs(reader.page(0, 100))
    assert first == [1, 2, 3]
    assert seqs(reader.page(3, 100)) == [4, 5, 6]
