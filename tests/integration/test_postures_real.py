"""Attached, shared and restart mode on real SGLang in CPU mode, alone and in the whole daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fleet_rig import directory_of, plan_of
from pool_rig import running
from rig import rig
from somebodys_server import SomebodysServer
from test_postures import shared_request

from evald.config import Attached, Fleet, Shared
from evald.engines.pin import served_version
from evald.errors import PinViolation, VersionChanged
from evald.point import PinTarget
from evald.postures.attached import attached_engines
from evald.postures.contract import Engines, GenerateRequest, Pin
from evald.postures.fleet import fleet_engines
from evald.postures.shared import shared_engines
from evald.testing import FakeTrainer, serve_fake, write_base_model, write_snapshot

# one server of the test's own for most of the module
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
QUESTIONS = [[10, 20, 30], [40, 50, 60, 70], [80, 90]]
POSTURE = """
[{name}]
model = "{{model}}"
urls = ["{url}"]
api_key_file = "{key_file}"
alive_timeout_s = 30
"""


def _target(root: Path, step: int, version: str | None = None) -> PinTarget:
    directory = write_snapshot(root / f"step_{step}", seed=step, answer=1)
    return PinTarget(
        run="demo",
        step=step,
        digest=f"{step:032x}"[::-1],
        directory=None if version else directory,
        weight_version=version,
    )


async def _answers(engines: Engines, pin: Pin) -> list[list[int]]:
    """Greedy answers, one request at a time: the batch must not change a bit."""
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    answers = []
    for number, ids in enumerate(QUESTIONS):
        request = GenerateRequest(
            prompts=[ids], sampling=[sampling], rid=f"q{id(pin)}-{number}", timeout_s=60.0
        )
        [generation] = await engines.generate(pin, request)
        assert generation.weight_version in pin.weight_versions.values()
        answers.append(generation.output_ids)
    return answers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("postures")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(root: Path) -> AsyncIterator[SomebodysServer]:
    server = await SomebodysServer.start(root)
    try:
        yield server
        assert server.process.returncode is None  # nobody has touched it
    finally:
        await server.stop()


async def test_attached_server_follows_the_snapshots_and_stays(server: SomebodysServer) -> None:
    config = Attached(model=str(server.model), urls=[server.url], api_key_env="KEY")
    engines = attached_engines(config, environ={"KEY": server.api_key})
    seen = []
    async with running(engines):
        for step in (1, 2, 1):
            pin = await engines.pin(_target(server.root, step))
            seen.append(await _answers(engines, pin))
            await engines.confirm(pin)
            await engines.unpin(pin)
        assert pin.sglang_version == "0.5.23"
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]
    os.kill(server.process.pid, 0)  # it lives
    # and evald is gone: another one can attach, to verify only
    assert await served_version(server.api) in pin.weight_versions.values()


async def test_attached_without_pin_verifies_what_others_load(server: SomebodysServer) -> None:
    config = Attached(
        model=str(server.model),
        urls=[server.url],
        api_key_env="KEY",
        pin=False,
        alive_timeout_s=5.0,
    )
    engines = attached_engines(config, environ={"KEY": server.api_key})
    async with running(engines):
        pinning = asyncio.create_task(engines.pin(_target(server.root, 3)))
        await asyncio.sleep(0.5)
        assert not pinning.done()
        await server.load(server.root / "step_3", "3")
        pin = await pinning
        assert await _answers(engines, pin)
        await engines.confirm(pin)
        await engines.unpin(pin)
        with pytest.raises(PinViolation, match="cannot verify weight version '4'"):
            await engines.pin(_target(server.root, 4))


async def test_shared_engine_is_measured_on_its_version_or_not_at_all(
    server: SomebodysServer,
) -> None:
    job = FakeTrainer([])
    served = await serve_fake(job)
    config = Shared(
        model=str(server.model),
        urls=[server.url],
        api_key_env="KEY",
        pause=f"{served.url}/pause",
        resume=f"{served.url}/resume",
    )
    engines = shared_engines(config, environ={"KEY": server.api_key})
    try:
        await server.load(directory_of(_target(server.root, 1)), "v1")
        async with running(engines):
            with pytest.raises(VersionChanged, match="serves weight version 'v1', not 'v2'"):
                await engines.pin(_target(server.root, 2, "v2"))
            pin = await engines.pin(_target(server.root, 1, "v1"))
            first = await _answers(engines, pin)
            await engines.confirm(pin)
            await engines.unpin(pin)
            assert job.calls == ["pause", "resume"] * 2

            # the trainer goes on too early, in the middle of a point
            pin = await engines.pin(_target(server.root, 1, "v1"))
            assert await _answers(engines, pin) == first
            await server.load(directory_of(_target(server.root, 2)), "v2")
            with pytest.raises(VersionChanged, match=r"came from weights \['v2'\]"):
                await _answers(engines, pin)
            with pytest.raises(VersionChanged):
                await engines.confirm(pin)
            await engines.unpin(pin)
            assert job.calls == ["pause", "resume"] * 3
    finally:
        await served.process.stop(0.0)
    os.kill(server.process.pid, 0)


def _posture(name: str, server: SomebodysServer) -> str:
    key_file = server.root / "key"
    key_file.write_text(server.api_key)
    return POSTURE.format(name=name, url=server.url, key_file=key_file)


async def test_attached_daemon_pins_point_by_point_and_the_server_outlives_it(
    tmp_path: Path, server: SomebodysServer
) -> None:
    posture = _posture("attached", server)
    with rig(tmp_path, model=server.model, posture=posture, questions=40) as r:
        r.start()
        for step in (1, 2):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=1)
            point = r.point(step, timeout_s=60)
            assert str(point.outcome) == "ok", point.detail
            assert point.counts.n_scored == point.counts.n_total == 80
            assert point.provenance["sglang"] == "0.5.23"
            assert all(v.startswith(f"t:{step}:") for v in point.weight_versions)
        assert r.stop() == 0
        assert not r.processes()
    await server.api.health_generate(30.0)
    assert await served_version(server.api) in point.weight_versions


async def test_shared_daemon_gives_a_number_for_the_servers_version_and_none_for_another(
    tmp_path: Path, server: SomebodysServer
) -> None:
    weights = write_snapshot(tmp_path / "trained", seed=40, answer=1, marker=None)
    posture = _posture("shared", server)
    with rig(tmp_path, model=server.model, posture=posture, questions=40) as r:
        r.start()
        await server.load(weights, "40")
        shared_request(r, 40, "40")
        point = r.point(40, timeout_s=60)
        assert str(point.outcome) == "ok", point.detail
        assert point.counts.n_scored == point.counts.n_total == 80
        assert point.weight_versions == ["40"]
        assert point.metrics["eval/a/weight_version/mean"] == 40
        assert "eval/a" in point.metrics
        shared_request(r, 41, "41")
        other = r.point(41, timeout_s=60)
        assert (str(other.outcome), other.reason) == ("skipped", "version_changed")
        assert other.metrics == {"eval/step": 41, "eval/skipped_version_changed": 1}
        assert r.stop() == 0
    # evald has loaded nothing
    assert await served_version(server.api) == "40"


async def test_restart_mode_starts_the_engine_on_the_snapshot(root: Path) -> None:
    config = Fleet(
        model=str(write_base_model(root / "restarted")),
        device="cpu",
        engines=1,
        pin_mode="restart",
        start_timeout_s=110.0,
        alive_timeout_s=110.0,
    )
    engines = fleet_engines(config, root / "results", plan=plan_of(config))
    async with running(engines):
        # without a tokenizer of its own: the base model's stands in
        target = _target(root, 5)
        for path in directory_of(target).glob("tokenizer*"):
            path.unlink()
        pin = await engines.pin(target)
        assert await _answers(engines, pin)
        [view] = engines.engines()
        assert (view.state, view.restarts) == ("serving", 0)
        assert view.weight_version == pin.weight_versions["engine-0"]
        assert view.pid is not None
        await engines.unpin(pin)
    with pytest.raises(ProcessLookupError):
        os.kill(view.pid, 0)
