"""Starts, probes, restarts and quarantine, against fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fleet_rig import Rig, directory_of, fleet, plan_of, texts

from evald.config import Fleet
from evald.engines.state import RestartPolicy, State
from evald.errors import EvaldError, GenerationFailed, PinViolation, Unhealthy
from evald.postures.contract import Pin
from evald.postures.fleet import fleet_engines
from evald.testing import (
    FakeEngine,
    FakeLauncher,
    Fault,
    write_fake_python,
)

UPDATE = "/update_weights_from_disk"
NAN_BF16 = b"\xc0\x7f"


pytestmark = pytest.mark.usefixtures("quick_engines")


async def test_failed_probes_restart_the_engine(base: Path) -> None:
    async with fleet(base, probe_interval_s=0.05, probe_timeout_s=0.05, probe_failures=2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/health_generate", Fault.BUSY)
        await asyncio.sleep(0.3)
        assert len(rig.launchers[0].engines) == 1  # one failure is none
        rig.fake().script("/health_generate", Fault.HANG, Fault.BUSY)
        await rig.until(lambda: len(rig.launchers[0].engines) == 2)
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]
        assert rig.posture.engines()[0].restarts == 1


@pytest.mark.parametrize("mode", ["update", "restart"])
async def test_an_engine_that_dies_while_it_is_drained_comes_back(base: Path, mode: str) -> None:
    async with fleet(base, pin_mode=mode, delay_s=0.5) as rig:
        first = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(first))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        await rig.posture.unpin(first)
        pinning = asyncio.create_task(rig.posture.pin(rig.target(2)))
        await rig.until_state(State.DRAINING)
        rig.fake().die()
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await asking
        assert texts(await rig.ask(await pinning)) == [r"\boxed{2}"]
        assert rig.task is not None
        assert not rig.task.done()


async def test_finished_responses_beat_probes(base: Path) -> None:
    async with fleet(base, probe_interval_s=0.2, probe_timeout_s=0.05, probe_failures=1) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/health_generate", *[Fault.BUSY] * 50)
        for _ in range(20):
            await rig.ask(pin)
            await asyncio.sleep(0.03)
        assert len(rig.launchers[0].engines) == 1


async def test_foreign_server_behind_the_port_is_refused(base: Path) -> None:
    async with fleet(base, wait_ready=False) as rig:
        rig.launchers[0].nonce = "somebody-else"
        await rig.until(lambda: len(rig.launchers[0].engines) == 2)
        rig.launchers[0].nonce = None
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]


async def test_start_that_hangs_ends_at_its_deadline(base: Path) -> None:
    def hang_once(fake: FakeEngine) -> None:
        if not started:
            fake.script("/health_generate", Fault.HANG)
        started.append(fake)

    started: list[FakeEngine] = []
    async with fleet(base, configure=hang_once, start_timeout_s=0.5, wait_ready=False) as rig:
        await rig.until_state(State.READY)
        assert len(started) == 2


async def test_all_quarantined_stops_the_fleet_loudly(base: Path) -> None:
    def refuse(launcher: FakeLauncher, _index: int) -> None:
        launcher.refuse = ["no such interpreter"] * 9

    async with fleet(base, engines=2, prepare=refuse, wait_ready=False) as rig:
        with pytest.raises(Unhealthy, match="all are quarantined"):
            await rig.posture.pin(rig.target(1))
        assert rig.task is not None
        with pytest.raises(EvaldError, match=r"all 2 engines are quarantined .*no such int"):
            await rig.task


async def test_a_full_disk_is_waited_for_and_not_held_against_the_engine(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartPolicy, "LOOK_AGAIN_S", 0.05)
    async with fleet(base) as rig:
        launcher, engine = rig.launchers[0], rig.engine()
        launcher.disk_fault = "cannot write into /logs: No space left on device"
        launcher.refuse = ["no room for the log"]
        launcher.processes[-1].kill()
        await rig.until_state(State.BACKOFF)
        assert engine.view().detail.startswith("cannot write into /logs: No space left")
        await asyncio.sleep(0.3)  # some more looks
        assert len(launcher.refuse) == 1  # nothing is started on a full disk
        for _ in range(6):  # each start fails over it once more
            launcher.refuse = ["no room for the log"]
            await rig.posture.restart("engine-0")
            await rig.until(lambda: not launcher.refuse)
            await rig.until_state(State.BACKOFF)
        assert engine.restarts == 0
        launcher.disk_fault = ""
        await rig.until_state(State.READY)
        assert engine.restarts == 0


async def test_operator_restarts_an_engine_in_mid_point(base: Path) -> None:
    async with fleet(base, delay_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(pin, samples=2))
        await rig.until(lambda: rig.engine().slots.in_flight == 2)
        await rig.posture.restart("engine-0")
        assert texts(await asking) == [r"\boxed{1}"] * 2
        assert len(rig.launchers[0].engines) == 2
        assert rig.posture.engines()[0].restarts == 0  # not held against it


async def test_operator_releases_an_engine_from_quarantine(base: Path) -> None:
    def refuse(launcher: FakeLauncher, index: int) -> None:
        if index == 1:
            launcher.refuse = ["the driver is broken"] * 5

    async with fleet(base, engines=2, prepare=refuse, wait_ready=False) as rig:
        await rig.until_state(State.QUARANTINED, 1)
        pin = await rig.posture.pin(rig.target(1))
        assert set(pin.weight_versions) == {"engine-0"}
        with pytest.raises(EvaldError, match="release it instead"):
            await rig.posture.restart("engine-1")
        await rig.posture.release("engine-1")
        await rig.until(lambda: len(pin.weight_versions) == 2)  # it joins the running point
        with pytest.raises(EvaldError, match="it is serving, not in quarantine"):
            await rig.posture.release("engine-1")
        with pytest.raises(EvaldError, match=r"cannot release engine 'x': .* engine-0, engine-1"):
            await rig.posture.release("x")


async def test_pin_gives_up_when_no_engine_is_alive(base: Path) -> None:
    async with fleet(base, alive_timeout_s=0.3) as rig:
        for launcher in rig.launchers:
            launcher._configure = lambda fake: fake.script("/health_generate", *[Fault.BUSY] * 999)
        rig.fake().die()
        await rig.until_state(State.STARTING)
        with pytest.raises(Unhealthy, match=r"no engine was alive for 0\.3 s .*engine-0 starting"):
            await rig.posture.pin(rig.target(1))


async def test_fleet_without_engines(base: Path) -> None:
    async with fleet(base, engines=0) as rig:
        target = rig.target(1)
        with pytest.raises(Unhealthy, match="the fleet has none"):
            await rig.posture.pin(target)
        assert rig.posture.capacity(Pin(target=target, weight_versions={})) == 1
        assert rig.posture.engines() == []


async def test_pin_before_the_engine_is_ready_waits_for_it(base: Path) -> None:
    async with fleet(
        base,
        configure=lambda fake: fake.script("/health_generate", Fault.BUSY, Fault.BUSY),
        alive_timeout_s=0.01,
        wait_ready=False,
    ) as rig:
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]


@contextlib.asynccontextmanager
async def processes(base: Path, directory: Path, **settings: Any) -> AsyncIterator[Rig]:
    """Run a fleet of real processes under guard, with a fake server in each."""
    config = Fleet(
        model=str(base),
        device="cpu",
        python=str(write_fake_python(directory / "python")),
        start_timeout_s=30.0,
        # so that coverage sees the children
        pass_env=["COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"],
        **settings,
    )
    posture = fleet_engines(config, directory / "results", plan=plan_of(config))
    task = asyncio.create_task(posture.run(), name="fleet")
    try:
        yield Rig(posture, [], directory)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_sigstop_in_mid_point(base: Path, tmp_path: Path) -> None:
    async with processes(
        base,
        tmp_path,
        engines=2,
        probe_interval_s=0.3,
        probe_timeout_s=0.5,
        probe_failures=2,
        stop_grace_s=0.2,
    ) as rig:
        posture = rig.posture
        pin = await posture.pin(rig.target(1))
        await rig.until(lambda: len(pin.weight_versions) == 2, timeout_s=30.0)
        frozen = posture.engines()[0].pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        answers = await asyncio.gather(*[rig.ask(pin, timeout_s=60.0) for _ in range(6)])
        assert {a.engine for group in answers for a in group} == {"engine-1"}
        await rig.until(lambda: posture.engines()[0].state == "serving", timeout_s=30.0)
        with pytest.raises(ProcessLookupError):
            os.kill(frozen, 0)
        assert posture.engines()[0].restarts == 1
        # no restart of the daemon: the engine serves the same point again, under a new label
        used = [a for _ in range(2) for a in await rig.ask(pin)]
        assert texts(used) == [r"\boxed{1}"] * 2


async def test_real_processes_under_guard_with_a_fake_server_in_them(
    base: Path, tmp_path: Path
) -> None:
    async with processes(
        base,
        tmp_path,
        engines=1,
        keep_logs=2,
        max_requests=7,
        stop_grace_s=5.0,
        sglang={"load_format": "safetensors", "max_running_requests": 7},
    ) as rig:
        posture = rig.posture
        bad = rig.target(1)
        shard = directory_of(bad) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(PinViolation, match=r"stage load: .*died of it \(code -9\), see .*log"):
            await posture.pin(bad)
        pin = await posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == [r"\boxed{2}"]
        assert posture.capacity(pin) == 7
        pid = posture.engines()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # a crash while it serves: back on the same snapshot
        assert texts(await rig.ask(pin, timeout_s=30.0)) == [r"\boxed{2}"]
        assert posture.engines()[0].restarts == 1
        last = posture.engines()[0].pid
        assert last is not None
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
    logs = sorted((tmp_path / "results" / "engines" / "engine-0").glob("*.log"))
    assert [log.name for log in logs] == ["0003.log", "0004.log"]
