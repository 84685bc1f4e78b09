"""Directories that never get their marker: each is told of once, and may be finished after all."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import rig, until
from staging_node import Node, snapshot

from evald.point import Outcome, PointKey, SkipReason
from evald.staging.offers import LostPoint, RunEnded
from evald.staging.validate import BaseModel
from evald.testing import write_base_model, write_snapshot
from evald.testing.fake_launcher import write_fake_python

MARKER = ".complete"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.read(write_base_model(tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture
def node(tmp_path: Path, base: BaseModel) -> Node:
    return Node(tmp_path / "root", base)


def unfinished(directory: Path, seed: int = 0) -> Path:
    """Write a snapshot without its marker."""
    snapshot(directory, seed)
    (directory / MARKER).unlink()
    return directory


async def lost(node: Node) -> LostPoint:
    offer = await node.next()
    assert isinstance(offer, LostPoint), offer
    assert offer.reason is SkipReason.CKPT_MISSING
    return offer


async def test_overtaken_by_a_newer_step_it_is_missing_once(node: Node) -> None:
    limits = {"unmarked_after_s": 600.0, "overtaken_after_s": 0.4}
    node.root.mkdir()
    directory = unfinished(node.root / "step_1")
    async with node.life(**limits):
        await node.nothing_more()
        snapshot(node.root / "step_2", seed=2)
        await node.end(await node.next_point())
        offer = await lost(node)
        assert (offer.key, offer.directory) == (PointKey("run", 1), directory)
        assert "stays without its marker .complete: nothing in it has changed" in offer.detail
        assert "for 0.4 s, and step 2 of its run is there" in offer.detail
        await node.nothing_more()
    async with node.life(**limits):
        await node.nothing_more()
        (directory / MARKER).touch()
        point = await node.next_point()
        assert point.key == PointKey("run", 1, revision=1)
        await node.end(point)


async def test_without_a_newer_step_it_has_more_time(node: Node) -> None:
    node.root.mkdir()
    unfinished(node.root / "a" / "step_5")
    async with node.life(unmarked_after_s=1.5, overtaken_after_s=0.2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await node.next()
        assert (await lost(node)).key == PointKey("a", 5)


async def test_what_is_being_written_is_not_missing(node: Node) -> None:
    node.root.mkdir()
    directory = unfinished(node.root / "step_5")
    async with node.life(unmarked_after_s=0.6, overtaken_after_s=0.6):
        with (directory / "model-2.bin").open("ab", buffering=0) as file:
            for _ in range(20):
                file.write(b"shard")
                await asyncio.sleep(0.1)
        assert node.offers.empty()
        await lost(node)


async def test_a_known_step_is_not_missing(node: Node) -> None:
    async with node.life(unmarked_after_s=0.2, overtaken_after_s=0.2):
        directory = snapshot(node.root / "step_3")
        await node.end(await node.next_point(), Outcome.OK)
        (directory / MARKER).unlink()  # it is written anew
        await node.nothing_more()


async def test_it_belongs_to_the_run_that_the_manifests_beside_it_name(node: Node) -> None:
    async with node.life(unmarked_after_s=60.0, overtaken_after_s=0.3):
        snapshot(node.root / "step_2", manifest={"run": "mine"})
        point = await node.next_point()
        assert point.key.run == "mine"
        await node.end(point)
        unfinished(node.root / "step_1", seed=1)
        assert (await lost(node)).key == PointKey("mine", 1)


async def test_at_the_end_of_its_run_it_is_missing_before_that_is_told(node: Node) -> None:
    node.root.mkdir()
    unfinished(node.root / "step_8")
    async with node.life(unmarked_after_s=600.0, overtaken_after_s=0.3):
        await node.nothing_more()
        (node.root / "run.end").write_text(json.dumps({"last_step": 8}))
        assert (await lost(node)).key == PointKey("run", 8)
        assert isinstance(await node.next(), RunEnded)


def test_one_that_evald_may_not_look_into_is_missing_until_it_is_opened(tmp_path: Path) -> None:
    limits = "unmarked_after_s = 1.0\novertaken_after_s = 1.0"
    # root, too, is to be refused
    refused = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), staging=limits) as r:
        r.start(before=refused if os.getuid() == 0 else [])
        directory = write_snapshot(r.root / ".hidden", answer=7)
        directory.chmod(0)
        directory = directory.rename(r.root / "step_1")
        point = r.point(1)
        assert point.reason == "ckpt_missing"
        assert f"evald may not look into {directory}, for 1 s now" in point.detail
        directory.chmod(0o755)
        assert str(r.point(1, revision=1).outcome) == "ok"


def test_in_a_whole_daemon_with_a_restart_between(tmp_path: Path) -> None:
    limits = "unmarked_after_s = 1.0\novertaken_after_s = 1.0"
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), staging=limits) as r:
        directory = write_snapshot(r.root / "step_1", answer=7)
        (directory / MARKER).unlink()
        r.start()
        point = r.point(1)
        assert (point.reason, point.metrics["eval/skipped_ckpt_missing"]) == ("ckpt_missing", 1)
        assert point.directory == str(directory)
        assert r.stop() == 0
        r.start()
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        r.point(2)
        (directory / MARKER).touch()
        assert str(r.point(1, revision=1).outcome) == "ok"
        until(lambda: len(r.points()) == 3, "nothing else is told")


async def test_a_closed_folder_of_a_run_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if path == f"{node.root}/other/.":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("evald.staging.scan.os.scandir", refuse)
    async with node.life(scan_interval_s=0.1):
        (node.root / "other").mkdir(mode=0o700)
        async with asyncio.timeout(20):
            while not node.alerts:
                await asyncio.sleep(0.02)
        snapshot(node.root / "step_1")
        await node.next_point()
        await asyncio.sleep(0.3)
    ((name, detail),) = node.alerts
    assert name == "snapshot_closed"
    assert f"cannot look into {node.root}/other: its mode is 0700" in detail
