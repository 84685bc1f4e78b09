"""What a pool looks at as the last answers of a point come in, and how often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from evald.config import EngineLimits
from evald.engines.engine import Engine, Upkeep
from evald.engines.launcher import Boot, Launched
from evald.engines.state import State
from evald.point import PinTarget
from evald.postures.assignment import Need, Seat, assign
from evald.postures.campaign import Campaign
from evald.postures.engine_pool import EnginePool, Member
from evald.postures.rules import ROLLING


class NoLauncher:
    """A launcher that nobody asks: the engines' state is the test's."""

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        raise NotImplementedError(attempt, boot)

    def log_fault(self) -> str:
        return ""


class Pool:
    """A pool whose engines all serve one point, and each of them answers ``in_flight`` samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, engines: int, in_flight: int) -> None:
        self.looks = 0
        members = [
            Member(name=f"e{n}", launcher=NoLauncher(), upkeep=Upkeep(start_timeout_s=1.0))
            for n in range(engines)
        ]
        self.pool = EnginePool(members, EngineLimits(), ROLLING)
        self.engines: list[Engine] = self.pool._engines
        self.campaign = self.add(1)
        self.campaign.versions.add("v")
        for engine in self.engines:
            engine.give(self.campaign.order)
            for state in (State.STARTING, State.READY, State.PINNING):
                engine.machine.transition(state)
            engine.pinned = self.campaign.order
            engine.machine.transition(State.SERVING)
            engine.slots.limit = in_flight
            engine.slots.enter(in_flight)
        self.left = engines * in_flight

        def counted(needs: Sequence[Need], seats: Sequence[Seat]) -> list[int | None]:
            self.looks += 1
            return assign(needs, seats)

        monkeypatch.setattr("evald.postures.campaigns.assign", counted)

    def add(self, step: int) -> Campaign:
        target = PinTarget(run="r", step=step, digest="d" * 32, directory=Path(f"/step_{step}"))
        campaign = Campaign(target, attempts=2, scouting=False)
        self.pool._campaigns.add(campaign)
        return campaign

    async def answered(self, engine: Engine, samples: int) -> None:
        """Answer some of an engine's samples, as a request that ends does."""
        engine.slots.leave(samples)
        self.left -= samples
        self.pool.left(self.campaign.pin, self.left)
        await asyncio.sleep(0)


@pytest.mark.parametrize("next_one", [False, True])
async def test_a_tail_is_not_looked_at_with_every_answer(
    monkeypatch: pytest.MonkeyPatch, *, next_one: bool
) -> None:
    world = Pool(monkeypatch, engines=64, in_flight=32)
    told = []
    world.pool.when_spare(world.campaign.pin, lambda: told.append(world.left))
    if next_one:
        world.add(2)
    for _ in range(32):
        for engine in world.engines:
            await world.answered(engine, 1)
    assert world.left == 0
    assert len(told) == (not next_one)
    # once for each engine that has none left, and now and then
    assert 64 <= world.looks <= 64 + 80


async def test_an_engine_goes_once_its_last_answer_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are full: as long as that answer is missing, it may be asked for again here."""
    world = Pool(monkeypatch, engines=16, in_flight=8)
    world.pool.left(world.campaign.pin, world.left)
    after = world.add(2)
    world.pool.changed()
    first, *others = world.engines
    assert all(engine.order is world.campaign.order for engine in world.engines)
    await world.answered(first, 8)
    assert first.order is after.order
    assert all(engine.order is world.campaign.order for engine in others)


async def test_samples_on_no_engine_keep_as_many_as_they_may_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function may think between two requests of a sample."""
    world = Pool(monkeypatch, engines=8, in_flight=4)
    world.pool.left(world.campaign.pin, world.left)
    world.add(2)
    for engine in world.engines:
        engine.slots.leave(4)
    await asyncio.sleep(0)
    kept = {}
    for left in range(31, -1, -1):
        world.pool.left(world.campaign.pin, left)
        kept[left] = sum(engine.order is world.campaign.order for engine in world.engines)
    # exactly at the end; until then an engine may go a few answers late
    assert [kept[left] for left in range(7, -1, -1)] == [2, 2, 2, 1, 1, 1, 1, 0]
    assert all(have - math.ceil(left / 4) in {0, 1} for left, have in kept.items())
