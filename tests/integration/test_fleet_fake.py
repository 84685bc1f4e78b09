"""Pinning by the fleet, against fake engines: real HTTP, real supervision, scripted faults."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from fleet_rig import directory_of, fleet, texts

from evald.engines.server_size import ServerSize
from evald.engines.state import State
from evald.errors import PinViolation, SnapshotGone
from evald.testing import (
    FakeLauncher,
    Fault,
    Tensor,
    model_tensors,
)

UPDATE = "/update_weights_from_disk"
NAN_BF16 = b"\xc0\x7f"


pytestmark = pytest.mark.usefixtures("quick_engines")


async def test_pins_a_then_b_then_a_and_answers_from_each(base: Path) -> None:
    async with fleet(base) as rig:
        seen = []
        for target in (rig.target(1), rig.target(2), rig.target(1)):
            pin = await rig.posture.pin(target)
            answers = await rig.ask(pin, samples=3)
            assert {a.weight_version for a in answers} == set(pin.weight_versions.values())
            assert len({a.weight_version.split(":")[3] for a in answers}) == 1
            assert answers[0].weight_version.startswith(f"demo:{target.step}:0000000")
            assert answers[0].finish_reason == "stop"
            assert answers[0].engine == "engine-0"
            seen.append(texts(answers))
            await rig.posture.unpin(pin)
        one, two = r"\boxed{1}", r"\boxed{2}"
        assert seen == [[one] * 3, [two] * 3, [one] * 3]
        update = rig.fake().updates[0]
        assert update["load_format"] == "auto"
        assert update["flush_cache"] is True
        assert update["abort_all_requests"] is False
        assert pin.sglang_version == "fake"


async def test_first_snapshot_of_a_run_goes_to_one_engine_first(base: Path) -> None:
    async with fleet(base, engines=3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        assert len(pin.weight_versions) == 1
        await rig.until(lambda: len(pin.weight_versions) == 3)
        assert len(set(pin.weight_versions.values())) == 3
        assert rig.posture.capacity(pin) == 3 * ServerSize(running=128).start(None)
        used = {(await rig.ask(pin))[0].engine for _ in range(2)}
        assert used == {"engine-0"}  # idle engines tie: the first one
        slow = [asyncio.create_task(rig.ask(pin)) for _ in range(6)]
        used = {answers[0].engine for answers in await asyncio.gather(*slow)}
        assert used == {"engine-0", "engine-1", "engine-2"}


async def test_second_snapshot_of_a_run_goes_to_all_engines_at_once(base: Path) -> None:
    async with fleet(base, engines=2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.posture.unpin(pin)
        pin = await rig.posture.pin(rig.target(2))
        await rig.until(lambda: len(pin.weight_versions) == 2)
        assert all(launcher.engines[-1].updates for launcher in rig.launchers)


async def test_truncated_shard_is_blamed_and_the_next_snapshot_served(base: Path) -> None:
    async with fleet(base) as rig:
        bad = rig.target(1)
        shard = directory_of(bad) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(PinViolation, match=r"2 attempts failed .*base model loads.* load: "):
            await rig.posture.pin(bad)
        assert len(rig.launchers[0].engines) == 3  # first life, second attempt, base again
        assert rig.posture.engines()[0].restarts == 0  # not the engine's fault
        assert rig.posture.engines()[0].state == "ready"
        pin = await rig.posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == [r"\boxed{2}"]


async def test_nan_is_found_by_the_canary(base: Path) -> None:
    async with fleet(base) as rig:
        tensors = model_tensors(answer=1)
        name = "model.layers.0.mlp.up_proj.weight"
        tensor = tensors[name]
        tensors[name] = Tensor(tensor.dtype, tensor.shape, NAN_BF16 + tensor.data[2:])
        with pytest.raises(PinViolation, match="canary: log-probabilities are not finite"):
            await rig.posture.pin(rig.target(1, tensors=tensors))


@pytest.mark.parametrize(
    ("path", "fault", "stage"),
    [
        (UPDATE, Fault.DIE, "load: .*connection"),
        (UPDATE, Fault.DROP, "load: .*connection"),
        (UPDATE, Fault.REJECT, "load: .*HTTP 400"),
        (UPDATE, Fault.FAIL, "load: .*HTTP 500"),
        (UPDATE, Fault.HANG, "load: .*no answer within"),
        (UPDATE, Fault.WRONG_LABEL, "read-back: .*instead of 'demo:1:"),
        ("/weights_checker", Fault.REJECT, "checksum: .*HTTP 400"),
        ("/generate", Fault.NAN, "canary: .*not finite"),
        ("/generate", Fault.WRONG_LABEL, "canary: .*somebody-else"),
        ("/generate", Fault.ABORT, "canary: "),
        ("/generate", Fault.DIE, "canary: .*connection"),
    ],
)
async def test_failed_stage_taints_is_retried_and_then_blamed(
    base: Path, path: str, fault: Fault, stage: str
) -> None:
    async with fleet(
        base, configure=lambda fake: fake.script(path, fault), load_timeout_s=0.3
    ) as rig:
        with pytest.raises(PinViolation, match=f"stage {stage}"):
            await rig.posture.pin(rig.target(1))
        assert len(rig.launchers[0].engines) == 3


async def test_one_failed_attempt_costs_a_restart_only(base: Path) -> None:
    async with fleet(base) as rig:
        rig.fake().script(UPDATE, Fault.REJECT)
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        assert len(rig.launchers[0].engines) == 2
        assert rig.posture.engines()[0].restarts == 0


async def test_other_weights_under_the_right_label_are_found_by_the_checksum(base: Path) -> None:
    async with fleet(base, engines=2) as rig:
        rig.launchers[1].engines[-1].script(UPDATE, Fault.LABEL_ONLY)
        pin = await rig.posture.pin(rig.target(1))
        # the second engine is tainted, restarts, and joins
        await rig.until(lambda: len(pin.weight_versions) == 2)
        assert len(rig.launchers[1].engines) == 2
        # the digest was proven by another engine: this one is at fault
        assert rig.posture.engines()[1].restarts == 1


async def test_bad_engine_does_not_cost_the_point(base: Path) -> None:
    def configure(launcher: FakeLauncher, index: int) -> None:
        if index == 0:
            launcher._configure = lambda fake: fake.script(UPDATE, *[Fault.REJECT] * 9)

    async with fleet(base, engines=2, prepare=configure) as rig:
        pin = await rig.posture.pin(rig.target(1))
        assert set(pin.weight_versions) == {"engine-1"}
        assert texts(await rig.ask(pin, samples=2)) == [r"\boxed{1}"] * 2
        await rig.until_state(State.QUARANTINED, 0)
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        assert rig.task is not None
        assert not rig.task.done()


async def test_snapshot_blamed_by_two_engines(base: Path) -> None:
    async with fleet(base, engines=2, configure=lambda fake: fake.script(UPDATE, Fault.DIE)) as rig:
        with pytest.raises(PinViolation, match="on engine-0, engine-1"):
            await rig.posture.pin(rig.target(1))


async def test_vanished_snapshot_is_no_ones_fault(base: Path) -> None:
    async with fleet(base) as rig:
        target = rig.target(1)
        shutil.rmtree(directory_of(target))
        with pytest.raises(SnapshotGone, match="vanished"):
            await rig.posture.pin(target)
        assert rig.posture.engines()[0].state == "ready"
        assert rig.fake().updates == []


async def test_snapshot_that_vanishes_while_it_loads(base: Path) -> None:
    async with fleet(base, load_timeout_s=0.3) as rig:
        target = rig.target(1)
        rig.fake().script(UPDATE, Fault.HANG)
        pinning = asyncio.create_task(rig.posture.pin(target))
        await rig.until(lambda: UPDATE in rig.fake().requests)
        shutil.rmtree(directory_of(target))
        with pytest.raises(SnapshotGone):
            await pinning
        assert rig.posture.engines()[0].restarts == 0
