"""The reference class: its own SGLang (a fake one, and the real one), or somebody's by URL."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from blackbox_rig import Rig

from evald.engines import guard
from evald.engines.ports import free_port
from evald.testing import model_tensors, write_base_model, write_fake_python, write_snapshot
from evald.testing.snapshots import Tensor

NAN_BF16 = b"\xc0\x7f"
CLASS = "evald.blackbox.sglang_reference:SGLangReference"


def reference(tmp_path: Path, **config: Any) -> Rig:
    rows = [{"prompt": f"question {n}", "label": "\\boxed{7}"} for n in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"data": "data.jsonl", "max_new_tokens": 16, **config}
    return Rig(tmp_path, **{"class": CLASS}, config=config, stop_grace_s=15.0)


def snapshot(tmp_path: Path, step: int, *, nan: bool = False) -> None:
    tensors = model_tensors(step, answer=step)
    if nan:
        old = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = Tensor("BF16", old.shape, NAN_BF16 + old.data[2:])
    write_snapshot(tmp_path / f"step_{step}", tensors=tensors)


def cut(tmp_path: Path, step: int) -> None:
    shard = tmp_path / f"step_{step}" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def children(rig: Rig) -> list[int]:
    pid = rig.posture.engines()[0].pid
    assert pid is not None
    return guard.descendants(pid)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base_model(tmp_path / "base")


async def test_its_own_server_lives_from_point_to_point(tmp_path: Path, base: Path) -> None:
    python = str(write_fake_python(tmp_path / "python"))
    rig = reference(tmp_path, model=str(base), device="cpu", python=python, name="sevens")
    async with rig:
        snapshot(tmp_path, 7)
        snapshot(tmp_path, 8)
        seven = await rig.evaluate(7)
        server = children(rig)
        eight = await rig.evaluate(8)
        assert children(rig) == server
        assert seven.metrics == {"eval/sevens": 1.0}
        assert eight.metrics == {"eval/sevens": 0.0}
        assert seven.counts.n_scored == 5
        (version,) = seven.weight_versions
        assert version.startswith("r:7:00000007:")
        (first, *_) = rig.samples(7, "sevens")
        assert (first.response, first.reference) == ("\\boxed{7}", "\\boxed{7}")
        assert (first.weight_version, first.engine) == (version, "sglang")
        # the server dies while nobody looks: the next point has a new one
        os.kill(server[-1], 9)
        assert (await rig.evaluate(7)).metrics == {"eval/sevens": 1.0}
    assert not [pid for pid in server if guard.read_stat(pid)]


async def test_what_no_server_loads_is_a_pin_violation(tmp_path: Path, base: Path) -> None:
    python = str(write_fake_python(tmp_path / "python"))
    async with reference(tmp_path, model=str(base), device="cpu", python=python) as rig:
        snapshot(tmp_path, 1)
        cut(tmp_path, 1)
        skip = await rig.skipped(1)
        assert skip.reason == "pin_violation"
        assert "2 attempts failed: load: " in skip.detail
        snapshot(tmp_path, 2, nan=True)
        skip = await rig.skipped(2)
        assert skip.reason == "pin_violation"
        assert "canary: log-probabilities are not finite" in skip.detail
        snapshot(tmp_path, 7)
        assert (await rig.evaluate(7)).metrics == {"eval/questions": 1.0}


async def test_a_server_that_does_not_start_is_unhealthy(tmp_path: Path, base: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no GPU here; exit 4\n")
    python.chmod(0o755)
    async with reference(tmp_path, model=str(base), device="cpu", python=str(python)) as rig:
        snapshot(tmp_path, 7)
        skip = await rig.skipped(7)
        assert skip.reason == "unhealthy"
        assert "no server: it died, code 4; see /" in skip.detail


@asynccontextmanager
async def somebodys_server(base: Path) -> AsyncIterator[str]:
    port = free_port()
    words = [
        "-m",
        "evald.testing",
        "--model-path",
        str(base),
        "--port",
        str(port),
        "--delay-s",
        "0.2",
    ]
    server = await asyncio.create_subprocess_exec(sys.executable, *words)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(20), aiohttp.ClientSession(url) as session:
            while True:
                try:
                    await session.get("/model_info")
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        yield url
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def script(url: str, path: str, *faults: str) -> None:
    body = {"path": path, "faults": faults}
    async with aiohttp.ClientSession(url) as session, session.post("/fault", json=body) as answer:
        assert answer.status == 200


async def in_the_middle(rig: Rig, url: str, *faults: str) -> None:
    """Script faults once questions are being asked, one after another for 0.2 s each."""
    evaluated = (rig.samples(7, "questions")[0].weight_version,) if rig.sets else ()
    async with asyncio.timeout(20), aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/model_info") as answer:
                version = (await answer.json())["weight_version"]
            if version.startswith("r:7:") and version not in evaluated:
                break
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await script(url, "/generate", *faults)


async def test_attached_to_somebodys_server(tmp_path: Path, base: Path) -> None:
    async with somebodys_server(base) as url, reference(tmp_path, url=url, concurrency=1) as rig:
        snapshot(tmp_path, 7)
        result = await rig.evaluate(7)
        assert (result.metrics, result.engines) == ({"eval/questions": 1.0}, [url])
        assert children(rig) == []
        # an answer in the middle has failed, one was cut short
        result, _ = await asyncio.gather(rig.evaluate(7), in_the_middle(rig, url, "fail", "abort"))
        assert (result.counts.n_scored, result.counts.n_error) == (3, 2)
        # an answer in the middle is of other weights
        skip, _ = await asyncio.gather(rig.skipped(7), in_the_middle(rig, url, "wrong_label"))
        assert skip.reason == "version_changed"
        # it says that it has loaded, twice, but keeps the old label
        await script(url, "/update_weights_from_disk", "wrong_label", "wrong_label")
        skip = await rig.skipped(7)
        assert skip.reason == "pin_violation"
        assert "read-back" in skip.detail


async def test_nobody_answers_at_the_url(tmp_path: Path) -> None:
    async with reference(tmp_path, url=f"http://127.0.0.1:{free_port()}") as rig:
        snapshot(tmp_path, 7)
        skip = await rig.skipped(7)
        assert skip.reason == "unhealthy"
        assert "no server: " in skip.detail


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "exactly one of model and url must be set"),
        ({"model": "/m", "url": "http://x"}, "exactly one of model and url must be set"),
        ({"urll": "http://x"}, "unknown field `urll`"),
        ({"url": "http://x", "data": "nowhere.jsonl"}, "FileNotFoundError"),
    ],
)
async def test_its_table_is_checked(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    async with reference(tmp_path, **config) as rig:
        skip = await rig.skipped(7)
        assert skip.reason == "crashed"
        assert says in skip.detail


@pytest.mark.timeout(300)
async def test_real_sglang(tmp_path: Path, base: Path) -> None:
    async with reference(tmp_path, model=str(base), device="cpu") as rig:
        snapshot(tmp_path, 1)
        snapshot(tmp_path, 2)
        first = await rig.evaluate(1)
        second = await rig.evaluate(2)
        again = await rig.evaluate(1)
        assert first.counts.n_scored == 5
        assert first.provenance["checksum"] == again.provenance["checksum"]
        assert first.provenance["checksum"] != second.provenance["checksum"]
        answers = [
            [sample.response for sample in rig.samples(step, "questions")] for step in (1, 2)
        ]
        assert answers[0] != answers[1]
        tree = children(rig)
    assert not [pid for pid in tree if guard.read_stat(pid)]
