"""Two points at a time on one fleet of fake engines: who has which engine, and what never mixes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fleet_rig import Rig, directory_of, fleet, texts

from evald.errors import PinViolation, Unhealthy
from evald.point import PinTarget
from evald.postures.contract import Generation, Pin
from evald.postures.rules import Rules
from evald.testing import Fault

pytestmark = pytest.mark.usefixtures("quick_engines")

ONE, TWO = [r"\boxed{1}"], [r"\boxed{2}"]


class Spare:
    """Whether a point was told that the next one may begin."""

    def __init__(self, rig: Rig, pin: Pin) -> None:
        self.told = asyncio.Event()
        rig.posture.when_spare(pin, self.told.set)


def served(rig: Rig, index: int) -> PinTarget | None:
    """What an engine serves now."""
    engine = rig.engine(index)
    serving = engine.pinned is not None and engine.serves(engine.pinned)
    return engine.pinned.target if engine.pinned is not None and serving else None


def slow_start(rig: Rig, index: int, *, looks: int) -> None:
    """Let the next lives of an engine be not ready at so many looks."""
    busy = [Fault.BUSY] * looks
    rig.launchers[index]._configure = lambda fake: fake.script("/health_generate", *busy)


async def with_straggler(
    rig: Rig, *, engines: int, delay_s: float = 1.5
) -> tuple[Pin, asyncio.Task[list[Generation]]]:
    """Pin step 1 on all engines, and have one answer that takes long, on the first."""
    pin = await rig.posture.pin(rig.target(1))
    await rig.until(lambda: len(pin.weight_versions) == engines)
    rig.fake(0).delay_s = delay_s
    straggler = asyncio.create_task(rig.ask(pin))
    await rig.until(lambda: rig.engine(0).slots.in_flight == 1)
    return pin, straggler


async def test_an_engine_without_work_goes_to_the_next_point(base: Path) -> None:
    async with fleet(base, engines=3) as rig:
        first, straggler = await with_straggler(rig, engines=3)
        spare = Spare(rig, first)
        assert not spare.told.is_set()
        rig.posture.left(first, 1)
        assert spare.told.is_set()
        second = await rig.posture.pin(rig.target(2))
        await rig.until(lambda: len(second.weight_versions) == 2)
        answers = await rig.ask(second)
        assert not straggler.done()
        assert texts(answers) == TWO
        assert answers[0].engine != "engine-0"
        late = await straggler
        assert (texts(late), late[0].engine) == (ONE, "engine-0")
        assert late[0].weight_version == first.weight_versions["engine-0"]
        # nothing of the first point is in flight, but one of its questions is open
        assert served(rig, 0) == first.target
        rig.posture.left(first, 0)
        await rig.until(lambda: len(second.weight_versions) == 3)
        await rig.posture.unpin(first)
        assert {served(rig, i) for i in range(3)} == {second.target}


async def test_one_engine_goes_on_the_moment_that_the_last_answer_is_in(base: Path) -> None:
    async with fleet(base) as rig:
        first, straggler = await with_straggler(rig, engines=1, delay_s=0.3)
        spare = Spare(rig, first)
        rig.posture.left(first, 1)
        await straggler
        assert not spare.told.is_set()  # its function may ask again
        rig.posture.left(first, 0)
        assert spare.told.is_set()
        second = await rig.posture.pin(rig.target(2))  # the first has not ended: it is graded
        rig.fake().delay_s = 0.0
        assert texts(await rig.ask(second)) == TWO
        await rig.posture.unpin(first)
        assert texts(await rig.ask(second)) == TWO


async def test_a_point_whose_last_engine_dies_gets_another_one_back(base: Path) -> None:
    async with fleet(base, engines=2) as rig:
        first, straggler = await with_straggler(rig, engines=2, delay_s=30.0)
        rig.posture.left(first, 1)
        second = await rig.posture.pin(rig.target(2))
        assert set(second.weight_versions) == {"engine-1"}
        slow_start(rig, 0, looks=20)
        rig.fake(0).die()
        assert texts(await straggler) == ONE
        answers = await straggler
        assert answers[0].engine == "engine-1"
        rig.posture.left(first, 0)
        assert texts(await rig.ask(second)) == TWO
        await rig.until(lambda: len(second.weight_versions) == 2)
        assert set(first.weight_versions) == {"engine-0", "engine-1"}


@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_a_snapshot_that_is_damaged_after_its_pin_costs_no_engine(
    base: Path, engines: int
) -> None:
    async with fleet(base, engines=engines) as rig:
        first, straggler = await with_straggler(rig, engines=engines, delay_s=30.0)
        rig.posture.left(first, 1)
        others = [await rig.posture.pin(rig.target(2))] if engines > 1 else []
        rig.target(1, answer=5)  # other bytes where the first point's have been
        rig.fake(0).die()
        with pytest.raises(Unhealthy, match="since then 2 attempts failed"):
            await straggler
        await rig.posture.unpin(first)
        pin = others[0] if others else await rig.posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == TWO
        await rig.until(lambda: len(pin.weight_versions) == engines)


async def test_an_engine_that_is_started_on_a_snapshot_counts_as_on_its_way(base: Path) -> None:
    async with fleet(base, engines=3, pin_mode="restart", start_timeout_s=20.0) as rig:
        first, straggler = await with_straggler(rig, engines=3, delay_s=30.0)
        rig.posture.left(first, 1)
        second = await rig.posture.pin(rig.target(2))
        await rig.until(lambda: len(second.weight_versions) == 2)
        for index in range(3):
            slow_start(rig, index, looks=5)
        lives = [len(launcher.engines) for launcher in rig.launchers]
        rig.fake(0).die()
        assert texts(await straggler) == ONE
        # one that died, and one that was started on the older point's snapshot: no third one
        lives_now = [len(launcher.engines) for launcher in rig.launchers]
        assert sum(lives_now) - sum(lives) == 2
        rig.posture.left(first, 0)
        assert texts(await rig.ask(second)) == TWO


async def test_a_point_without_an_engine_waits_for_those_that_an_older_one_has(base: Path) -> None:
    async with fleet(base, engines=2, alive_timeout_s=0.3) as rig:
        first, straggler = await with_straggler(rig, engines=2, delay_s=30.0)
        rig.posture.left(first, 1)
        second = await rig.posture.pin(rig.target(2))
        # the first one has the only engine that is left, for longer than an engine may be away
        rig.fake(1).delay_s = 1.0
        slow_start(rig, 0, looks=999)
        rig.fake(0).die()
        await rig.until(lambda: served(rig, 1) == first.target)
        asking = asyncio.create_task(rig.ask(second))
        assert texts(await straggler) == ONE
        assert not asking.done()
        rig.posture.left(first, 0)
        assert texts(await asking) == TWO


@pytest.mark.parametrize("proven", [False, True], ids=["first-of-run", "proven-run"])
async def test_a_bad_snapshot_costs_the_point_before_it_nothing(
    base: Path, *, proven: bool
) -> None:
    async with fleet(base, engines=3) as rig:
        first, straggler = await with_straggler(rig, engines=3, delay_s=2.0)
        rig.posture.left(first, 1)
        bad = rig.target(2)
        shard = directory_of(bad) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        if not proven:
            rig.posture._proven_runs.clear()
        with pytest.raises(PinViolation, match="2 attempts failed"):
            await rig.posture.pin(bad)
        assert not straggler.done()
        assert len(rig.launchers[0].engines) == 1
        late = await straggler
        assert (texts(late), late[0].engine) == (ONE, "engine-0")
        third = await rig.posture.pin(rig.target(3))
        assert texts(await rig.ask(third)) == [r"\boxed{3}"]


async def test_points_that_do_not_roll_have_all_engines_until_their_end(base: Path) -> None:
    async with fleet(base, engines=2, rules=Rules()) as rig:
        first, straggler = await with_straggler(rig, engines=2, delay_s=0.3)
        spare = Spare(rig, first)
        rig.posture.left(first, 1)
        await straggler
        rig.posture.left(first, 0)
        assert not spare.told.is_set()
        await rig.posture.unpin(first)
        second = await rig.posture.pin(rig.target(2))
        assert texts(await rig.ask(second)) == TWO


async def with_one_on_each(
    rig: Rig, *, delay_s: float, **sampling: Any
) -> tuple[Pin, list[asyncio.Task[list[Generation]]]]:
    """Pin step 1 on three engines, and have an answer that takes long on each of them."""
    pin = await rig.posture.pin(rig.target(1))
    await rig.until(lambda: len(pin.weight_versions) == 3)
    for index in range(3):
        rig.fake(index).delay_s = delay_s
    asking = [asyncio.create_task(rig.ask(pin, **sampling)) for _ in range(3)]
    await rig.until(lambda: [rig.engine(i).slots.in_flight for i in range(3)] == [1, 1, 1])
    return pin, asking


async def test_the_last_answers_go_on_together_when_somebody_wants_their_engines(
    base: Path,
) -> None:
    async with fleet(base, engines=3) as rig:
        first, asking = await with_one_on_each(rig, delay_s=3.0)
        spare = Spare(rig, first)
        rig.posture.left(first, 3)
        await asyncio.wait_for(spare.told.wait(), 5)
        # but nobody has come yet
        assert [rig.engine(i).slots.in_flight for i in range(3)] == [1, 1, 1]
        second = await rig.posture.pin(rig.target(2))
        await rig.until(lambda: len(second.weight_versions) == 2)
        assert not any(task.done() for task in asking)
        for index in range(3):
            rig.fake(index).delay_s = 0.0
        assert texts(await rig.ask(second)) == TWO
        late = [(await task)[0] for task in asking]
        assert texts(late) == ONE * 3
        assert len({answer.engine for answer in late}) == 1
        assert {answer.weight_version for answer in late} <= set(first.weight_versions.values())


@pytest.mark.parametrize("how", ["off", "deterministic", "stop-strings"])
async def test_answers_stay_where_they_are(base: Path, how: str) -> None:
    rules = Rules(rolling=True, consolidate=how != "off")
    async with fleet(base, engines=3, rules=rules) as rig:
        if how == "deterministic":
            rig.engine(1).may_move = False
        sampling = {"stop": ["so"]} if how == "stop-strings" else {}
        first, asking = await with_one_on_each(rig, delay_s=1.0, **sampling)
        rig.posture.left(first, 3)
        second = asyncio.create_task(rig.posture.pin(rig.target(2)))
        answers = [(await task)[0] for task in asking]
        assert {answer.engine for answer in answers} == {"engine-0", "engine-1", "engine-2"}
        rig.posture.left(first, 0)
        assert texts(await rig.ask(await second)) == TWO
