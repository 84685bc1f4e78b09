"""The fleet against fake engines: real HTTP, real supervision, scripted faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evald.config import Fleet
from evald.engines import engine as engine_module
from evald.engines.engine import Engine
from evald.engines.state import RestartPolicy, State
from evald.errors import EvaldError, GenerationFailed, PinViolation, SnapshotGone, Unhealthy
from evald.postures.contract import GenerateRequest, Generation, Pin, PinTarget
from evald.postures.fleet import FleetPosture
from evald.testing import (
    FakeEngine,
    FakeLauncher,
    Fault,
    Tensor,
    model_tensors,
    write_base_model,
    write_fake_python,
    write_snapshot,
)

UPDATE = "/update_weights_from_disk"
NAN_BF16 = b"\xc0\x7f"
_rids = itertools.count()


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartPolicy, "FIRST_S", 0.02)
    monkeypatch.setattr(engine_module, "DEATH_NOTICE_S", 0.2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base_model(tmp_path / "base", answer=0)


class Rig:
    """A running fleet and the fakes behind it."""

    def __init__(self, posture: FleetPosture, launchers: list[FakeLauncher], root: Path) -> None:
        self.posture = posture
        self.launchers = launchers
        self.root = root
        self.task: asyncio.Task[None] | None = None

    def target(self, step: int, *, answer: int | None = None, **options: Any) -> PinTarget:
        directory = write_snapshot(
            self.root / f"step_{step}", answer=step if answer is None else answer, **options
        )
        return target_of(directory, step)

    async def ask(self, pin: Pin, samples: int = 1, timeout_s: float = 10.0) -> list[Generation]:
        return await self.posture.generate(pin, request(samples, timeout_s))

    def engine(self, index: int = 0) -> Engine:
        return self.posture._engines[index]

    def fake(self, index: int = 0) -> FakeEngine:
        return self.launchers[index].engines[-1]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - observed from outside, on purpose
                await asyncio.sleep(0.01)

    async def until_state(self, state: State, index: int = 0) -> None:
        await self.until(lambda: self.engine(index).state is state)


def target_of(directory: Path, step: int) -> PinTarget:
    return PinTarget(run="demo", step=step, digest=f"{step:08x}" * 4, directory=directory)


def request(samples: int = 1, timeout_s: float = 10.0) -> GenerateRequest:
    sampling = [
        {"temperature": 0.0, "max_new_tokens": 32, "sampling_seed": i} for i in range(samples)
    ]
    return GenerateRequest(
        input_ids=[1, 2, 3], sampling=sampling, rid=f"q{next(_rids)}", timeout_s=timeout_s
    )


@contextlib.asynccontextmanager
async def fleet(
    base: Path,
    engines: int = 1,
    *,
    configure: Callable[[FakeEngine], None] = lambda _: None,
    delay_s: float = 0.0,
    max_running_requests: int = 128,
    prepare: Callable[[FakeLauncher, int], None] = lambda _launcher, _index: None,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[Rig]:
    launchers: list[FakeLauncher] = []

    def factory(_name: str, index: int) -> FakeLauncher:
        launcher = FakeLauncher(
            base,
            configure=configure,
            delay_s=delay_s,
            max_running_requests=max_running_requests,
        )
        prepare(launcher, index)
        launchers.append(launcher)
        return launcher

    settings = {"start_timeout_s": 5.0, "load_timeout_s": 5.0, "alive_timeout_s": 5.0} | settings
    config = Fleet(model=str(base), device="cpu", engines=engines, **settings)
    root = base.parent
    rig = Rig(FleetPosture(config, results_dir=root, launcher_factory=factory), launchers, root)
    rig.task = asyncio.create_task(rig.posture.run(), name="fleet")
    try:
        if wait_ready:
            await rig.until(lambda: all(e.state is State.READY for e in rig.posture._engines))
        yield rig
    finally:
        rig.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup, EvaldError):
            await rig.task
        for launcher in launchers:
            assert all(process.returncode is not None for process in launcher.processes)


def texts(answers: list[Generation]) -> list[str]:
    return [answer.text for answer in answers]


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
        assert rig.posture.capacity() == 3 * 128
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
        shard = bad.directory / "model.safetensors"
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
        shutil.rmtree(target.directory)
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
        shutil.rmtree(target.directory)
        with pytest.raises(SnapshotGone):
            await pinning
        assert rig.posture.engines()[0].restarts == 0


async def test_dead_engine_is_restarted_pinned_again_and_requests_survive(base: Path) -> None:
    async with fleet(base, delay_s=0.2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        first = dict(pin.weight_versions)
        asking = [asyncio.create_task(rig.ask(pin, samples=2)) for _ in range(4)]
        await rig.until(lambda: rig.engine().slots.in_flight == 8)
        rig.fake().die()
        answers = [answer for group in await asyncio.gather(*asking) for answer in group]
        assert texts(answers) == [r"\boxed{1}"] * 8
        assert pin.weight_versions != first  # a fresh label, of the same digest
        assert {a.weight_version for a in answers} == set(pin.weight_versions.values())
        assert rig.posture.engines()[0].restarts == 1


async def test_drain_lets_requests_finish_before_the_next_pin(base: Path) -> None:
    async with fleet(base, delay_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        second = await rig.posture.pin(rig.target(2))
        assert texts(await asking) == [r"\boxed{1}"]
        assert texts(await rig.ask(second)) == [r"\boxed{2}"]
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await rig.ask(pin)


async def test_drain_deadline_aborts_what_runs(base: Path) -> None:
    async with fleet(base, drain_timeout_s=0.1) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        rig.fake().delay_s = 0.0
        # (the running request keeps its 30 s)
        second = await rig.posture.pin(rig.target(2))
        assert len(rig.fake().aborted) == 1
        assert texts(await rig.ask(second)) == [r"\boxed{2}"]
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await asking


@pytest.mark.parametrize("fault", [Fault.ABORT, Fault.BUSY, Fault.DROP, Fault.FAIL])
async def test_void_answers_are_asked_again(base: Path, fault: Fault) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", fault, fault)
        assert texts(await rig.ask(pin, samples=2)) == [r"\boxed{1}"] * 2


async def test_retry_prefers_another_engine(base: Path) -> None:
    async with fleet(base, engines=2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: len(pin.weight_versions) == 2)
        rig.fake(0).script("/generate", *[Fault.BUSY] * 5)
        answers = await rig.ask(pin)
        assert answers[0].engine == "engine-1"


async def test_answer_of_other_weights_is_void_and_the_engine_restarted(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", Fault.WRONG_LABEL)
        answers = await rig.ask(pin)
        assert texts(answers) == [r"\boxed{1}"]
        assert len(rig.launchers[0].engines) == 2
        assert rig.posture.engines()[0].restarts == 1


async def test_rejected_request_is_the_samples_fault(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", Fault.REJECT)
        with pytest.raises(GenerationFailed, match="HTTP 400") as caught:
            await rig.ask(pin)
        assert caught.value.kind == "rejected"
        assert rig.posture.engines()[0].state == "serving"


async def test_request_fails_after_three_errors(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", *[Fault.FAIL] * 3)
        with pytest.raises(GenerationFailed, match="HTTP 500") as caught:
            await rig.ask(pin)
        assert caught.value.kind == "error"


async def test_timeout_aborts_the_samples_at_the_engine(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        with pytest.raises(GenerationFailed, match=r"no complete answer within 0\.2 s") as caught:
            await rig.ask(pin, samples=2, timeout_s=0.2)
        assert caught.value.kind == "timeout"
        await rig.until(lambda: len(rig.fake().aborted) == 2)
        assert rig.engine().slots.in_flight == 0


async def test_cancelled_request_is_aborted_too(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: bool(rig.fake()._running))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await rig.until(lambda: len(rig.fake().aborted) == 1)


async def test_in_flight_is_bounded_for_each_engine(base: Path) -> None:
    async with fleet(base, delay_s=0.05, max_requests=4) as rig:
        pin = await rig.posture.pin(rig.target(1))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, rig.engine().slots.in_flight)
                await asyncio.sleep(0.005)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*[rig.ask(pin, samples=2) for _ in range(8)])
        assert most == 4
        assert len(await rig.ask(pin, samples=9)) == 9  # larger than the limit: alone
        watcher.cancel()


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


async def test_pin_gives_up_when_no_engine_is_alive(base: Path) -> None:
    async with fleet(base, alive_timeout_s=0.3) as rig:
        for launcher in rig.launchers:
            launcher._configure = lambda fake: fake.script("/health_generate", *[Fault.BUSY] * 999)
        rig.fake().die()
        await rig.until_state(State.STARTING)
        with pytest.raises(Unhealthy, match=r"no engine was alive for 0\.3 s .*engine-0 starting"):
            await rig.posture.pin(rig.target(1))


async def test_requests_give_up_when_no_engine_serves_any_more(base: Path) -> None:
    async with fleet(base, alive_timeout_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.launchers[0]._configure = lambda fake: fake.script(
            "/health_generate", *[Fault.BUSY] * 999
        )
        rig.fake().die()
        with pytest.raises(Unhealthy, match=r"no engine has served the snapshot for 0\.3 s"):
            await rig.ask(pin)


async def test_requests_give_up_when_the_snapshot_has_vanished_too(base: Path) -> None:
    async with fleet(base) as rig:
        target = rig.target(1)
        pin = await rig.posture.pin(target)
        shutil.rmtree(target.directory)
        rig.fake().die()
        with pytest.raises(Unhealthy, match="vanished"):
            await rig.ask(pin)


async def test_fleet_without_engines(base: Path) -> None:
    async with fleet(base, engines=0) as rig:
        with pytest.raises(Unhealthy, match="the fleet has none"):
            await rig.posture.pin(rig.target(1))
        assert rig.posture.engines() == []
        assert rig.posture.capacity() == 1


async def test_pin_before_the_engine_is_ready_waits_for_it(base: Path) -> None:
    async with fleet(
        base,
        configure=lambda fake: fake.script("/health_generate", Fault.BUSY, Fault.BUSY),
        alive_timeout_s=0.01,
        wait_ready=False,
    ) as rig:
        pin = await rig.posture.pin(rig.target(1))
        assert texts(await rig.ask(pin)) == [r"\boxed{1}"]


async def test_real_processes_under_guard_with_a_fake_server_in_them(
    base: Path, tmp_path: Path
) -> None:
    config = Fleet(
        model=str(base),
        device="cpu",
        engines=1,
        python=str(write_fake_python(tmp_path / "python")),
        keep_logs=2,
        stop_grace_s=5.0,
        start_timeout_s=30.0,
        # so that coverage sees the child
        pass_env=["COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"],
        sglang={"load_format": "safetensors", "max_running_requests": 7},
    )
    posture = FleetPosture(config, results_dir=tmp_path / "results")
    rig = Rig(posture, [], tmp_path)
    task = asyncio.create_task(posture.run(), name="fleet")
    try:
        bad = rig.target(1)
        shard = bad.directory / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(PinViolation, match=r"stage load: .*died of it \(code -9\), see .*log"):
            await posture.pin(bad)
        pin = await posture.pin(rig.target(2))
        assert texts(await rig.ask(pin)) == [r"\boxed{2}"]
        assert posture.capacity() == 7
        pid = posture.engines()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # a crash while it serves: back on the same snapshot
        assert texts(await rig.ask(pin, timeout_s=30.0)) == [r"\boxed{2}"]
        assert posture.engines()[0].restarts == 1
        last = posture.engines()[0].pid
        assert last is not None
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
    logs = sorted((tmp_path / "results" / "engines" / "engine-0").glob("*.log"))
    assert [log.name for log in logs] == ["0003.log", "0004.log"]
