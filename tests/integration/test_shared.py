"""The shared posture against fake servers and a fake trainer: weights are only ever read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fleet_rig import texts
from pool_rig import Host, ask, hosts, running, states, until

from evald.config import Shared
from evald.errors import EvaldError, Unhealthy, VersionChanged
from evald.point import PinTarget
from evald.postures.contract import Engines, Pin
from evald.postures.shared import shared_engines
from evald.testing import FakeTrainer, Fault, serve_fake, write_base_model

pytestmark = pytest.mark.usefixtures("quick_engines")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base_model(tmp_path / "base", answer=5)


def shared(base: Path, servers: list[Host], **settings: object) -> Engines:
    table = {
        "model": str(base),
        "urls": [host.url for host in servers],
        "alive_timeout_s": 2.0,
    } | settings
    return shared_engines(msgspec.convert(table, Shared), environ={})


def target(version: str = "v7", step: int = 7) -> PinTarget:
    return PinTarget(run="demo", step=step, digest="7" * 32, directory=None, weight_version=version)


@contextlib.asynccontextmanager
async def trainer(servers: list[Host]) -> AsyncIterator[tuple[FakeTrainer, dict[str, str]]]:
    """Run a training job that asks the servers all the time, and its pause and resume URLs."""
    job = FakeTrainer([host.url for host in servers])
    served = await serve_fake(job)
    task = asyncio.create_task(job.run(), name="trainer")
    try:
        yield job, {"pause": f"{served.url}/pause", "resume": f"{served.url}/resume"}
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await served.process.stop(0.0)


def updates(servers: list[Host]) -> int:
    return sum(len(host.fake.updates) for host in servers)


async def test_checks_before_on_every_answer_and_after_and_never_loads(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        engines = shared(base, servers)
        async with running(engines):
            await asyncio.sleep(0.1)
            assert all(host.fake.requests == [] for host in servers)  # nothing while no point runs
            pin = await engines.pin(target())
            assert set(pin.weight_versions.values()) == {"v7"}
            assert len(pin.weight_versions) == 2
            both = await asyncio.gather(*[ask(engines, pin, samples=2) for _ in range(4)])
            answers = [answer for group in both for answer in group]
            assert texts(answers) == [r"\boxed{5}"] * 8
            assert {a.weight_version for a in answers} == {"v7"}
            assert pin.sglang_version == "fake"
            before = [host.fake.requests.count("/model_info") for host in servers]
            await engines.confirm(pin)
            after = [host.fake.requests.count("/model_info") for host in servers]
            assert [n - m for n, m in zip(after, before, strict=True)] == [1, 1]
            await engines.unpin(pin)
            await until(lambda: states(engines) == ["stopped"] * 2)
        assert updates(servers) == 0
        assert all(host.alive for host in servers)
        assert not any("/health_generate" in host.fake.requests for host in servers)


async def test_other_weights_before_the_point(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        servers[1].fake.weight_version = "v8"
        engines = shared(base, servers)
        async with running(engines):
            with pytest.raises(VersionChanged, match="serves weight version 'v8', not 'v7'"):
                await engines.pin(target())
            pin = await _next(engines, servers, "v9")  # the next point is another matter
            await engines.unpin(pin)


async def _next(engines: Engines, servers: list[Host], version: str) -> Pin:
    for host in servers:
        host.fake.weight_version = version
    return await engines.pin(target(version))


async def test_other_weights_in_an_answer_are_never_a_number(base: Path) -> None:
    async with hosts(base, 1, weight_version="v7") as servers:
        engines = shared(base, servers)
        async with running(engines):
            pin = await engines.pin(target())
            servers[0].fake.delay_s = 0.3
            asking = [asyncio.create_task(ask(engines, pin)) for _ in range(3)]
            await until(lambda: len(servers[0].fake._running) == 3)
            servers[0].fake.weight_version = "v8"
            results = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(result) for result in results} == {VersionChanged}
            with pytest.raises(VersionChanged, match=r"came from weights \['v8'\]"):
                await engines.confirm(pin)
            await engines.unpin(pin)


async def test_other_weights_on_any_engine_after_the_last_answer(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        engines = shared(base, servers)
        async with running(engines):
            pin = await engines.pin(target())
            await ask(engines, pin)
            servers[1].fake.weight_version = "v8"
            with pytest.raises(VersionChanged, match="'v8' after the last answer, not 'v7'"):
                await engines.confirm(pin)
            await engines.unpin(pin)


async def test_engine_that_is_lost_cannot_be_confirmed(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        engines = shared(base, servers, probe_timeout_s=0.5)
        async with running(engines):
            pin = await engines.pin(target())
            servers[1].die()
            answers = [a for _ in range(4) for a in await ask(engines, pin)]
            assert {a.engine for a in answers} == {servers[0].url.partition("//")[2]}
            with pytest.raises(Unhealthy, match=r"cannot confirm that engine .*connection failed"):
                await engines.confirm(pin)
            await engines.unpin(pin)


async def test_engine_that_comes_back_with_other_weights_ends_the_point(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        engines = shared(base, servers, probe_interval_s=0.05, probe_failures=1)
        async with running(engines):
            pin = await engines.pin(target())
            servers[1].die()
            await until(lambda: "starting" in states(engines))
            await servers[1].start(weight_version="v8")
            await until(lambda: states(engines)[0] == "stopped")  # nobody serves the point now
            with pytest.raises(VersionChanged, match="serves weight version 'v8'"):
                await ask(engines, pin)
            await engines.unpin(pin)


async def test_engine_that_is_not_there_is_waited_for(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers:
        servers[1].die()
        engines = shared(base, servers)
        async with running(engines):
            pinning = asyncio.create_task(engines.pin(target()))
            await asyncio.sleep(0.3)
            assert not pinning.done()
            await servers[1].start(weight_version="v7")
            await engines.unpin(await pinning)
            servers[1].die()
            with pytest.raises(Unhealthy, match="not every engine was alive for 2 s"):
                await engines.pin(target())
            await until(lambda: states(engines) == ["stopped"] * 2)


async def test_operator_cannot_restart_them(base: Path) -> None:
    async with hosts(base) as servers:
        engines = shared(base, servers)
        name = servers[0].url.partition("//")[2]
        with pytest.raises(EvaldError, match="evald did not start it"):
            await engines.restart(name)
        with pytest.raises(EvaldError, match="not in quarantine"):
            await engines.release(name)


# --- pause and resume ---------------------------------------------------------------------------


async def test_no_training_request_reaches_an_engine_between_pause_and_resume(base: Path) -> None:
    async with hosts(base, 2, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, **urls)
        async with running(engines):
            await until(lambda: all(len(host.fake.rids) > 3 for host in servers))
            pin = await engines.pin(target())
            marks = [len(host.fake.rids) for host in servers]
            assert job.calls == ["pause"]
            assert job.bodies == [{"run": "demo", "step": 7}]
            for _ in range(5):
                await asyncio.gather(*[ask(engines, pin) for _ in range(4)])
                await asyncio.sleep(0.05)
            await engines.confirm(pin)
            seen = [h.fake.rids[mark:] for h, mark in zip(servers, marks, strict=True)]
            assert sum(map(len, seen)) == 20
            assert not [rid for rids in seen for rid in rids if rid.startswith("rollout")]
            await engines.unpin(pin)
            assert job.calls == ["pause", "resume"]
            sent = job.sent
            await until(lambda: job.sent > sent + 3)


@pytest.mark.parametrize(
    ("trouble", "error", "sentence"),
    [
        ("version", VersionChanged, "'v8'"),
        ("lost", Unhealthy, "not every engine was alive"),
        ("pause", Unhealthy, "cannot pause the trainer: .*HTTP 500: not now; nothing was"),
    ],
)
async def test_resumes_when_the_pin_fails(
    base: Path, trouble: str, error: type[EvaldError], sentence: str
) -> None:
    async with hosts(base, 1, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, alive_timeout_s=0.3, **urls)
        async with running(engines):
            if trouble == "version":
                servers[0].fake.weight_version = "v8"
            elif trouble == "lost":
                servers[0].fake.script("/model_info", *[Fault.BUSY] * 99)
            else:
                job.failures = 1
            with pytest.raises(error, match=sentence):
                await engines.pin(target())
            assert job.calls == ["pause", "resume"]
            assert not job.paused


async def test_resumes_when_the_point_is_cancelled_even_twice(base: Path) -> None:
    async with hosts(base, 1, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, **urls)
        async with running(engines):
            job.failures = 0

            async def point() -> None:
                pin = await engines.pin(target())
                job.failures = 1  # the first try to resume fails: it takes a while
                try:
                    await asyncio.Event().wait()
                finally:
                    await engines.unpin(pin)

            task = asyncio.create_task(point())
            await until(lambda: job.failures == 1)
            task.cancel()
            await until(lambda: job.calls == ["pause", "resume"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # the next point does not begin before that: it would run beside the trainer
            pin = await engines.pin(target())
            assert job.calls == ["pause", "resume", "resume", "pause"]
            assert job.paused
            job.failures = 1
            task = asyncio.create_task(engines.unpin(pin))
            await until(lambda: len(job.calls) == 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # the end of the daemon has waited for it
        assert job.calls[4:] == ["resume", "resume"]
        assert not job.paused


async def test_cancelled_while_pausing_resumes(base: Path) -> None:
    async with hosts(base, 1, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, **urls)
        async with running(engines):
            servers[0].fake.delay_s = 0.3  # a rollout runs: the pause waits for it
            pinning = asyncio.create_task(engines.pin(target()))
            await until(lambda: job.calls == ["pause"])
            pinning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pinning
            assert job.calls == ["pause", "resume"]
            await until(lambda: not job.paused)


async def test_pause_that_is_not_answered_ends_the_point_in_time(base: Path) -> None:
    async with hosts(base, 1, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, pause_timeout_s=0.3, **urls)
        async with running(engines):
            await until(lambda: job.sent > 0)
            servers[0].fake.freeze()  # the rollout never ends
            await asyncio.sleep(0.05)
            with pytest.raises(Unhealthy, match=r"did not answer within 0\.3 s; nothing was meas"):
                await engines.pin(target())
            assert job.calls == ["pause", "resume"]
            servers[0].fake.thawed.set()


async def test_trainer_that_cannot_be_resumed_is_an_error_in_the_log_not_in_the_point(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hosts(base, 1, weight_version="v7") as servers, trainer(servers) as (job, urls):
        engines = shared(base, servers, pause_timeout_s=0.3, **urls)
        async with running(engines):
            pin = await engines.pin(target())
            job.failures = 99
            await engines.unpin(pin)
            job.failures = 0
    assert "trainer_not_resumed" in capsys.readouterr().out
