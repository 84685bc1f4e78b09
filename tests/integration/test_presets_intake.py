"""Roots of other frameworks, watched while those write: each checkpoint is offered exactly once."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from preset_trees import INDEX, SAVES, SHARDS, age, save
from staging_node import Node, until

from evald.point import PointKey
from evald.presets import PRESETS
from evald.staging import notices
from evald.staging.offers import InvalidPoint, RunEnded
from evald.staging.validate import BaseModel
from evald.testing import write_base_model, write_safetensors
from evald.trainer.publish import end_run

PRESET_NAMES = sorted(PRESETS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.read(write_base_model(tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture
def node(tmp_path: Path, base: BaseModel) -> Node:
    root = tmp_path / "root"
    root.mkdir()
    return Node(root, base)


def settings(preset: str, scan_interval_s: float = 0.1) -> dict[str, Any]:
    return {
        "preset": preset,
        "scan_interval_s": scan_interval_s,
        **PRESETS[preset].settings,
    }


async def slowly(preset: str, root: Path, step: int, seed: int) -> None:
    """Save, with about one look of the watch after each write."""
    for write in SAVES[preset](root, step, seed):
        write()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("preset", PRESET_NAMES)
async def test_each_is_offered_once_whatever_is_seen_of_it(node: Node, preset: str) -> None:
    async with node.life(**settings(preset)):
        for step in (1, 2):
            await slowly(preset, node.root, step, seed=step)
        points = [await node.next_point() for _ in range(2)]
        assert [point.key for point in points] == [PointKey("run", 1), PointKey("run", 2)]
        for point in points:
            assert not point.snapshot.owned
            await node.end(point)
        # resumed from an earlier step: other bytes are another revision
        age(node.root)
        await slowly(preset, node.root, 1, seed=3)
        again = await node.next_point()
        assert again.key == PointKey("run", 1, 1)
        assert again.snapshot.digest not in [point.snapshot.digest for point in points]
        await node.end(again)
    # a later life finds all of them answered
    async with node.life():
        await node.nothing_more()
    assert node.alerts == []


async def test_one_that_is_being_deleted_is_never_judged(node: Node) -> None:
    save("hf-trainer", node.root, 1)
    save("hf-trainer", node.root, 2)
    dying = node.root / "checkpoint-1"
    (dying / SHARDS[0]).unlink()  # the rest goes while evald looks
    async with node.life(**settings("hf-trainer")):
        assert (await node.next_point()).key.step == 2
        for path in sorted(dying.iterdir()):
            await asyncio.sleep(0.1)
            path.unlink()
        dying.rmdir()
        await node.nothing_more()


async def test_a_fault_that_stays_is_told(node: Node) -> None:
    async with node.life(**settings("hf-trainer")):
        save("hf-trainer", node.root, 1)
        (node.root / "checkpoint-1" / SHARDS[0]).unlink()
        save("hf-trainer", node.root, 2)
        for name in (*SHARDS, INDEX):
            (node.root / "checkpoint-2" / name).unlink()
        write_safetensors(node.root / "checkpoint-2" / "adapter_model.safetensors", {})
        (node.root / "checkpoint-2" / "trainer_state.json").touch()
        offers = {}
        for _ in range(2):
            offer = await node.next()
            assert isinstance(offer, InvalidPoint)
            offers[offer.point.key.step] = offer.detail
        assert f"{INDEX} names {SHARDS[0]}, which is missing" in offers[1]
        assert "it is a LoRA adapter" in offers[2]
        await node.nothing_more()


async def test_verl_without_weights_says_what_to_set(node: Node) -> None:
    async with node.life(**settings("verl")):
        save("verl", node.root, 1)
        for path in node.root.rglob("*.safetensors*"):
            path.unlink()
        (node.root / "latest_checkpointed_iteration.txt").touch()
        offer = await node.next()
        assert isinstance(offer, InvalidPoint)
        assert offer.detail.endswith(PRESETS["verl"].weights)


async def test_the_end_of_a_run_waits_for_its_last_checkpoint(node: Node) -> None:
    async with node.life(**settings("hf-trainer", scan_interval_s=0.5)):
        save("hf-trainer", node.root, 1)
        end_run(node.root, 1)
        assert (await node.next_point()).key.step == 1
        assert isinstance(await node.next(), RunEnded)


async def test_one_that_vanishes_before_the_end_does_not_hold_it_up(node: Node) -> None:
    async with node.life(**settings("hf-trainer", scan_interval_s=0.5)) as intake:
        settling = intake._settling
        assert settling is not None
        save("hf-trainer", node.root, 1)
        end_run(node.root, 1)
        await until(lambda: bool(settling.restless))
        shutil.rmtree(node.root / "checkpoint-1")
        assert isinstance(await node.next(), RunEnded)


async def test_a_checkpoint_that_stays_in_doubt_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_DOUBT_S", 0.3)
    save("hf-trainer", node.root, 1)
    age(node.root)
    directory = node.root / "checkpoint-1"
    (directory / SHARDS[0]).touch()
    async with node.life(**settings("hf-trainer")):
        await until(lambda: bool(node.alerts))
        await node.nothing_more()
        ((name, sentence),) = node.alerts
        assert name == "snapshot_doubtful"
        assert sentence.startswith(f"cannot take snapshot {directory}: {SHARDS[0]} is newer")
        # what the sentence says helps
        (directory / "trainer_state.json").touch()
        assert (await node.next_point()).key.step == 1
