"""What a watcher of the status keeps while daemons and ledgers come and go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from status_stage import stage

from evald.errors import EvaldError
from evald.status.terminal.source import Shown, Source


def source_of(socket: Path) -> Source:
    return Source(lambda: socket)


def steps(shown: Shown) -> list[int]:
    return [point.step for point in shown.points]


async def test_only_the_end_of_a_long_ledger_is_read_and_then_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evald.status.terminal.source.FIRST_LOOK", 20)
    async with stage(tmp_path, tcp=False) as one:
        await one.add_points(1, 100)
        source = source_of(one.server.socket)
        assert steps(await source.refresh()) == list(range(81, 101))
        await one.add_points(101, 103)
        assert steps(await source.refresh()) == list(range(81, 104))


async def test_another_ledger_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    socket: Path | None = None

    def find() -> Path:
        if socket is None:
            raise EvaldError("cannot find it")
        return socket

    source = Source(find)
    with pytest.raises(EvaldError, match="cannot find it"):
        await source.refresh()
    async with stage(tmp_path / "a", tcp=False) as one:
        socket = one.server.socket
        await one.add_points(1, 5)
        assert steps(await source.refresh()) == [1, 2, 3, 4, 5]
        assert source.fault == ""
    with pytest.raises(EvaldError, match="none is running"):
        await source.refresh()
    assert "none is running" in source.fault
    assert source.shown is not None
    assert steps(source.shown) == [1, 2, 3, 4, 5]
    async with stage(tmp_path / "b", tcp=False) as other:
        socket = other.server.socket  # it is looked for again
        await other.add_points(7, 20)
        assert steps(await source.refresh()) == list(range(7, 21))


async def test_a_daemon_whose_seq_went_back_has_another_ledger(tmp_path: Path) -> None:
    results = tmp_path / "results"
    async with stage(results, tcp=False) as one:
        await one.add_points(1, 3)
        source = source_of(one.server.socket)
        await source.refresh()
    shutil.rmtree(results)
    async with stage(results, tcp=False) as again:
        await again.add_points(9, 9)
        assert steps(await source.refresh()) == [9]
