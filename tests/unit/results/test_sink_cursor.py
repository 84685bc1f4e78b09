from pathlib import Path

import pytest

from evald.errors import EvaldError
from evald.results.sinks import cursor as cursors
from evald.results.sinks.cursor import Cursor, Gate, Mark
from evald.results.sinks.rows import Row


def row(seq: int, time: float = 0.0) -> Row:
    return Row(seq=seq, record_id=f"r{seq}", time=time, run="demo", step=seq, metrics={})


def marks(first: int, last: int) -> Cursor:
    return Cursor(Mark.of(row(first)), Mark.of(row(last)))


def sort(gate: Gate, *rows: Row) -> list[tuple[int, bool]]:
    clear = [pair for one in rows for pair in gate.sort(one)]
    return [(one.seq, known) for one, known in [*clear, *gate.settle()]]


def test_without_a_cursor_all_is_new() -> None:
    assert sort(Gate(None), row(2), row(4)) == [(2, False), (4, False)]


def test_the_same_ledger_goes_on_behind_the_cursor() -> None:
    gate = Gate(marks(2, 4))
    assert sort(gate, row(2), row(4), row(6)) == [(2, True), (4, True), (6, False)]
    assert not gate.is_other


def test_a_ledger_without_its_beginning_is_known_by_the_last_row() -> None:
    gate = Gate(marks(2, 6))
    assert sort(gate, row(4), row(6), row(8)) == [(4, True), (6, True), (8, False)]


def test_a_copy_that_is_behind_is_waited_for() -> None:
    gate = Gate(marks(2, 6))
    assert sort(gate, row(2), row(4)) == [(2, True), (4, True)]
    assert sort(gate, row(6), row(8)) == [(6, True), (8, False)]


@pytest.mark.parametrize("seqs", [(2, 4), (2, 6), (2, 6, 9), (1, 7)])
def test_another_ledger_is_new_from_its_first_row(seqs: tuple[int, ...]) -> None:
    gate = Gate(marks(2, 6))
    assert sort(gate, *(row(seq, time=9.0) for seq in seqs)) == [(seq, False) for seq in seqs]
    assert gate.is_other


def test_a_cursor_is_whole_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "d" / "x.cursor"
    assert cursors.load(path) is None
    cursors.store(path, marks(2, 4))
    assert cursors.load(path) == marks(2, 4)
    assert [one.name for one in path.parent.iterdir()] == ["x.cursor"]
    path.write_text("{")
    with pytest.raises(EvaldError, match=r"x\.cursor: .*delete it to deliver everything again"):
        cursors.load(path)
