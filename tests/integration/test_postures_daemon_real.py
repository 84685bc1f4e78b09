"""The whole daemon beside one real SGLang server (CPU mode) that somebody else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from rig import rig
from somebodys_server import SomebodysServer
from test_postures import shared_request

from evald.engines.pin import served_version
from evald.testing import write_snapshot

pytestmark = pytest.mark.timeout(300)
T = TypeVar("T")


class Server:
    """A real server in the hands of tests that have no event loop of their own."""

    def __init__(self, root: Path, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._server = self.do(SomebodysServer.start(root))
        self.api = self._server.api
        self.load = self._server.load
        self.model = self._server.model
        self.key_file = root / "key"
        self.key_file.write_text(self._server.api_key)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Act as the one who runs it."""
        return self._runner.run(work)

    def stop(self) -> None:
        untouched = self._server.process.returncode is None
        self.do(self._server.stop())
        assert untouched

    def posture(self, name: str) -> str:
        return f"""
[{name}]
model = "{{model}}"
urls = ["{self._server.url}"]
api_key_file = "{self.key_file}"
alive_timeout_s = 30
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        server = Server(tmp_path_factory.mktemp("somebody"), runner)
        yield server
        server.stop()


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
