"""Time that points have had: it adds up over lives, and nothing that lies there can harm."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import accepted, ended

from evald.config import Results
from evald.point import PointKey
from evald.results import time_used
from evald.results.index import PointIndex
from evald.results.pause import Pause
from evald.results.time_used import NAME, PointTime, TimeUsed

KEY = PointKey("a", 1)


@pytest.fixture(autouse=True)
def quick_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_used, "INTERVAL_S", 0.05)


@pytest.fixture
def index() -> PointIndex:
    index = PointIndex()
    for step in (1, 2):
        index.apply(accepted(step))
    return index


def times(directory: Path, index: PointIndex, pause: Pause | None = None) -> TimeUsed:
    return TimeUsed(Results(dir=str(directory)), index=index, pause=pause or Pause())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_another_life_goes_on_from_what_was_noted(tmp_path: Path, index: PointIndex) -> None:
    began = time.monotonic()
    async with times(tmp_path, index).of(KEY) as one:
        assert one.used_s == 0.0
        assert one.begin("x") == 0.0
        assert one.begin("y") == 0.0
        await asyncio.sleep(0.2)
        one.end("y")
        one.end("never begun")
        await asyncio.sleep(0.2)
        killed = (tmp_path / NAME).read_bytes()  # what a killed daemon leaves
    (tmp_path / NAME).write_bytes(killed)
    async with times(tmp_path, index).of(KEY) as one:
        used_s, x_s, y_s = one.used_s, one.begin("x"), one.begin("y")
        # what is noted is ahead by one interval
        most_s = time.monotonic() - began + time_used.INTERVAL_S
        assert 0.35 < used_s <= most_s
        assert 0.35 < x_s <= most_s
        assert 0.15 < y_s < x_s - 0.1
    async with times(tmp_path, index).of(PointKey("a", 2)) as other:
        assert other.used_s == 0.0


async def test_a_life_counts_at_least_one_interval(
    tmp_path: Path, index: PointIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_used, "INTERVAL_S", 50.0)
    began = time.monotonic()
    for life in range(3):
        async with times(tmp_path, index).of(KEY) as one:
            assert one.used_s == pytest.approx(50.0 * life, abs=20.0)
            await until(lambda: noted(tmp_path) > 50.0 * life + 40.0)  # noqa: B023 (it is awaited)
    assert time.monotonic() - began < 50.0


def noted(directory: Path) -> float:
    try:
        return float(json.loads((directory / NAME).read_bytes())["a/step/1/r0"][""])
    except FileNotFoundError:
        return -1.0


async def test_ended_points_are_forgotten(tmp_path: Path, index: PointIndex) -> None:
    first = times(tmp_path, index)
    async with first.of(KEY):
        await until((tmp_path / NAME).exists)
    index.apply(ended(1))
    async with first.of(PointKey("a", 2)):
        await until(lambda: json.loads((tmp_path / NAME).read_bytes()).keys() == {"a/step/2/r0"})
    index.apply(ended(2))
    async with times(tmp_path, index).of(PointKey("a", 2)) as one:
        assert one.used_s == 0.0


async def test_pauses_do_not_count() -> None:
    pause = Pause()
    one = PointTime({}, pause)
    full = True

    async def write() -> None:
        if full:
            raise OSError(28, "No space left on device")

    waiting = asyncio.create_task(pause.insist(Path("/full"), write))
    await until(lambda: pause.why != "")
    await asyncio.sleep(0.3)
    assert one.so_far()[""] < 0.15
    waiting.cancel()


@pytest.mark.parametrize("content", [b"", b"{torn", b"[]", b'{"a/step/1/r0": 4}', b"\xff"])
async def test_what_cannot_be_read_costs_nothing_else(
    tmp_path: Path, index: PointIndex, content: bytes
) -> None:
    (tmp_path / NAME).write_bytes(content)
    async with times(tmp_path, index).of(KEY) as one:
        assert one.used_s == 0.0
        await until(lambda: (tmp_path / NAME).read_bytes().startswith(b'{"a/step/1/r0":'))


async def test_what_cannot_be_written_costs_nothing_else(tmp_path: Path, index: PointIndex) -> None:
    (tmp_path / NAME).mkdir()
    async with times(tmp_path, index).of(KEY) as one:
        await asyncio.sleep(0.2)
        assert one.so_far()[""] > 0.1
