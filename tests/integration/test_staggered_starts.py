"""The engines of a fleet load their program in turns; one that has died in a point is not in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_rig import fleet, texts

from evald.engines.state import State
from evald.postures import fleet as fleet_posture
from evald.testing import FakeEngine, FakeLauncher

pytestmark = pytest.mark.usefixtures("quick_engines")


@pytest.fixture(autouse=True)
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_posture, "places_for", lambda _processes: 1)


async def test_the_next_engine_starts_when_the_one_before_has_answered(base: Path) -> None:
    fakes: list[FakeEngine] = []

    def cold(fake: FakeEngine) -> None:
        fake.freeze()
        fakes.append(fake)

    async with fleet(base, engines=3, configure=cold, wait_ready=False) as rig:

        async def loads_alone(count: int) -> None:
            await rig.until(lambda: len(fakes) >= count and bool(fakes[-1].requests))
            assert len(fakes) == count
            fakes[-1].thawed.set()
            await rig.until_state(State.READY, count - 1)

        for count in (1, 2, 3):
            await loads_alone(count)


async def test_a_restart_in_mid_point_is_not_behind_a_first_start(base: Path) -> None:
    def cold(launcher: FakeLauncher, index: int) -> None:
        if index == 1:
            launcher._configure = lambda fake: fake.freeze()

    async with fleet(base, engines=2, prepare=cold, wait_ready=False, start_timeout_s=30) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: bool(rig.launchers[1].engines))
        rig.fake(0).die()
        await rig.until(lambda: len(rig.launchers[0].engines) == 2)
        await rig.until_state(State.SERVING)
        assert rig.engine(1).state is State.STARTING
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        rig.fake(1).thawed.set()
