"""The whole daemon beside one real SGLang server (CPU mode) that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fleet_rig import plan_of
from rig import rig
from test_postures import shared_request

from evald.config import Fleet
from evald.engines.api import EngineAPI, EngineError
from evald.engines.flags import launch_command
from evald.engines.pin import served_version
from evald.engines.ports import free_port
from evald.engines.process import EngineProcess
from evald.testing import write_base_model, write_snapshot

pytestmark = pytest.mark.timeout(300)
T = TypeVar("T")


class Server:
    """A real server, and what the one who runs it can do with it."""

    def __init__(self, root: Path, runner: asyncio.Runner) -> None:
        self.model = write_base_model(root / "base", answer=1)
        self.key_file = root / "key"
        self._root = root
        self._runner = runner

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Act as the one who runs it."""
        return self._runner.run(work)

    async def start(self) -> None:
        fleet = Fleet(model=str(self.model), device="cpu", engines=1)
        command = launch_command(
            fleet,
            plan_of(fleet).engines[0],
            port=(port := free_port()),
            nonce="default",
            config_file=self._root / "server.yaml",
        )
        command.write_config_file()
        self.key_file.write_text(command.api_key)
        self.process = await EngineProcess.start(
            command.argv, command.env, self._root / "server.log", name="somebody's"
        )
        self.url = f"http://127.0.0.1:{port}"
        self.api = EngineAPI(self.url, command.api_key, limit=4)
        async with asyncio.timeout(110.0):
            while True:
                with contextlib.suppress(EngineError):
                    await self.api.health_generate(30.0)
                    return
                await asyncio.sleep(0.2)

    async def load(self, directory: Path, version: str) -> None:
        await self.api.update_weights(str(directory), version, "auto", 60.0)

    async def stop(self) -> None:
        if hasattr(self, "process"):
            await self.api.close()
            await self.process.stop(5.0)

    def posture(self, name: str) -> str:
        return f"""
[{name}]
model = "{{model}}"
urls = ["{self.url}"]
api_key_file = "{self.key_file}"
alive_timeout_s = 30
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        server = Server(tmp_path_factory.mktemp("somebody"), runner)
        try:
            server.do(server.start())
            yield server
            assert server.process.returncode is None  # nobody has touched it
        finally:
            server.do(server.stop())


def test_attached_server_is_pinned_point_by_point_and_outlives_the_daemon(
    tmp_path: Path, server: Server
) -> None:
    with rig(tmp_path, model=server.model, posture=server.posture("attached"), questions=40) as r:
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
    server.do(server.api.health_generate(30.0))
    assert server.do(served_version(server.api)) in point.weight_versions


def test_shared_server_gives_a_number_for_its_version_and_none_for_another(
    tmp_path: Path, server: Server
) -> None:
    weights = write_snapshot(tmp_path / "trained", seed=40, answer=1, marker=None)
    with rig(tmp_path, model=server.model, posture=server.posture("shared"), questions=40) as r:
        r.start()
        server.do(server.load(weights, "40"))
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
    assert server.do(served_version(server.api)) == "40"
