"""Engines that are started on each snapshot, and the test that decides for or against updates."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from fleet_rig import directory_of, fleet, texts

from evald.errors import PinViolation, SnapshotGone
from evald.testing import FakeEngine, FakeLauncher, Fault

UPDATE = "/update_weights_from_disk"
CHECKER = "/weights_checker"


pytestmark = pytest.mark.usefixtures("quick_engines")


def boots(launcher: FakeLauncher) -> list[str]:
    """What an engine was started on, in order: "base", "step_1", ..."""
    return [boot.directory.name if boot else "base" for boot in launcher.boots]


async def test_engine_is_started_on_the_snapshot_and_proven_by_its_nonce(base: Path) -> None:
    async with fleet(base, pin_mode="restart") as rig:
        for step in (1, 2):
            pin = await rig.posture.pin(rig.target(step))
            answers = await rig.ask(pin, samples=2)
            assert texts(answers) == [rf"\boxed{{{step}}}"] * 2
            [version] = pin.weight_versions.values()
            assert version.startswith(f"demo:{step}:")
            boot = rig.launchers[0].boots[-1]
            assert boot is not None
            assert boot.weight_version == version
            assert CHECKER in rig.fake().requests  # the checksum, too
            assert any(rid.startswith("canary/") for rid in rig.fake().rids)
            await rig.posture.unpin(pin)
        assert boots(rig.launchers[0]) == ["base", "step_1", "step_2"]
        assert not any(fake.updates for fake in rig.launchers[0].engines)
        assert rig.posture.engines()[0].restarts == 0  # nothing is held against it


async def test_first_snapshot_goes_to_one_engine_first_the_others_join(base: Path) -> None:
    async with fleet(base, engines=3, pin_mode="restart") as rig:
        pin = await rig.posture.pin(rig.target(1))
        assert len(pin.weight_versions) == 1
        await rig.until(lambda: len(pin.weight_versions) == 3)
        assert [boots(launcher) for launcher in rig.launchers] == [["base", "step_1"]] * 3


async def test_snapshot_that_no_engine_starts_on_is_blamed(base: Path) -> None:
    async with fleet(base, pin_mode="restart") as rig:
        bad = rig.target(1)
        shard = directory_of(bad) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(
            PinViolation, match=r"2 attempts failed .*base model loads.* at stage start: .*code 1"
        ):
            await rig.posture.pin(bad)
        assert boots(rig.launchers[0]) == ["base", "step_1", "step_1", "base"]
        assert rig.posture.engines()[0].restarts == 0
        pin = await rig.posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == [r"\boxed{2}"]


async def test_two_engines_that_cannot_start_on_it_are_enough(base: Path) -> None:
    async with fleet(base, engines=3, pin_mode="restart") as rig:
        bad = rig.target(1)
        (directory_of(bad) / "model.safetensors").write_bytes(b"")
        with pytest.raises(PinViolation, match="2 attempts failed"):
            await rig.posture.pin(bad)
        starts = sorted(boots(launcher) for launcher in rig.launchers)
        assert sum(line.count("step_1") for line in starts) == 2


async def test_start_that_hangs_is_an_attempt_too(base: Path) -> None:
    def hang_on_a_snapshot(fake: FakeEngine) -> None:
        if fake.model.name == "step_1":
            fake.freeze()

    async with fleet(
        base, pin_mode="restart", configure=hang_on_a_snapshot, start_timeout_s=0.4
    ) as rig:
        with pytest.raises(PinViolation, match=r"stage start: not ready within 0\.4 s"):
            await rig.posture.pin(rig.target(1))


@pytest.mark.parametrize(
    ("path", "fault", "stage"),
    [(CHECKER, Fault.REJECT, "checksum"), ("/generate", Fault.NAN, "canary: .*not finite")],
)
async def test_started_is_not_proven(base: Path, path: str, fault: Fault, stage: str) -> None:
    async with fleet(
        base, pin_mode="restart", configure=lambda fake: fake.script(path, fault)
    ) as rig:
        with pytest.raises(PinViolation, match=f"stage {stage}"):
            await rig.posture.pin(rig.target(1))


async def test_engine_that_dies_comes_back_on_the_snapshot(base: Path) -> None:
    async with fleet(base, pin_mode="restart") as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().die()
        assert texts(await rig.ask(pin, samples=2)) == [r"\boxed{1}"] * 2
        assert boots(rig.launchers[0]) == ["base", "step_1", "step_1"]
        assert rig.posture.engines()[0].restarts == 1


async def test_requests_end_before_the_engine_starts_on_the_next_snapshot(base: Path) -> None:
    async with fleet(base, pin_mode="restart", delay_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        await rig.posture.unpin(pin)
        await rig.posture.pin(rig.target(2))
        assert rig.launchers[0].engines[-2].aborted == []
        with pytest.raises(Exception, match="the point has ended"):
            await asking


async def test_vanished_snapshot_is_no_ones_fault(base: Path) -> None:
    async with fleet(base, pin_mode="restart") as rig:
        target = rig.target(1)
        shutil.rmtree(directory_of(target))
        with pytest.raises(SnapshotGone, match="vanished"):
            await rig.posture.pin(target)
        pin = await rig.posture.pin(rig.target(2))
        directory = directory_of(pin.target)
        shutil.rmtree(directory)
        rig.fake().die()  # comes back on the base model: there is nothing else
        await rig.until(lambda: boots(rig.launchers[0])[-1] == "base")


async def test_another_snapshot_is_not_kept_waiting_by_a_start(base: Path) -> None:
    def slow(fake: FakeEngine) -> None:
        if fake.model.name == "step_1":
            fake.freeze()

    async with fleet(base, pin_mode="restart", configure=slow, start_timeout_s=30.0) as rig:
        pinning = asyncio.create_task(rig.posture.pin(rig.target(1)))
        await rig.until(lambda: boots(rig.launchers[0])[-1] == "step_1")
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        async with asyncio.timeout(10.0):
            pin = await rig.posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == [r"\boxed{2}"]


# --- the test of pin_mode = "update" ------------------------------------------------------------


async def test_update_test_runs_once_and_keeps_updates(base: Path) -> None:
    async with fleet(base, engines=2, update_test=True) as rig:
        fakes = [launcher.engines[0] for launcher in rig.launchers]
        [update] = [update for fake in fakes for update in fake.updates]
        assert update["model_path"] == str(base)
        rig.fake(0).die()
        rig.fake(1).die()
        await rig.until(lambda: all(len(launcher.engines) == 2 for launcher in rig.launchers))
        await rig.until(lambda: all(view.state == "ready" for view in rig.posture.engines()))
        assert not any(rig.fake(i).updates for i in range(2))  # not at each start
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        assert [boots(launcher) for launcher in rig.launchers] == [["base", "base"]] * 2


@pytest.mark.parametrize(
    ("path", "faults", "why"),
    [
        (UPDATE, [Fault.DIE], "connection failed"),
        (UPDATE, [Fault.REJECT], "HTTP 400"),
        (UPDATE, [Fault.OTHER_WEIGHTS], "checksum is"),
        ("/generate", [Fault.NAN], "not finite"),
    ],
)
@pytest.mark.parametrize("engines", [1, 2])
async def test_update_test_that_fails_makes_the_fleet_restart_and_says_why(
    base: Path,
    path: str,
    faults: list[Fault],
    why: str,
    engines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet(
        base, engines, update_test=True, configure=lambda fake: fake.script(path, *faults)
    ) as rig:
        assert all(view.restarts == 0 for view in rig.posture.engines())  # no engine is at fault
        for launcher in rig.launchers:
            launcher._configure = lambda _fake: None
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        await rig.until(lambda: len(pin.weight_versions) == engines)
        assert {boots(launcher)[-1] for launcher in rig.launchers} == {"step_1"}
        failed = [fake for launcher in rig.launchers for fake in launcher.engines if fake.updates]
        assert len(failed) <= 2  # two tries, then never again
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if "pin_mode_restart" in line]
    assert why in line
    assert "set fleet.pin_mode = 'restart'" in line


async def test_one_failure_of_the_update_test_is_none(base: Path) -> None:
    first: list[FakeEngine] = []

    def fail_once(fake: FakeEngine) -> None:
        if not first:
            fake.script(UPDATE, Fault.DIE)
        first.append(fake)

    async with fleet(base, update_test=True, configure=fail_once) as rig:
        assert len(first) == 2
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        assert boots(rig.launchers[0]) == ["base", "base"]
