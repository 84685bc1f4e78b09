"""Snapshots come in, on a real directory with real inotify; only the dispatcher is simple."""

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from staging_node import Node, snapshot, until
from structlog.testing import capture_logs

from evald.errors import EvaldError
from evald.point import Outcome, PointKey
from evald.staging import candidate as candidate_module
from evald.staging.candidate import Reader
from evald.staging.digest import HashingStopped
from evald.staging.intake import Intake
from evald.staging.offers import InvalidPoint, RunEnded, TrainerSkip
from evald.staging.retention import Retention
from evald.staging.scan import FoundSnapshot
from evald.staging.validate import BaseModel
from evald.testing import write_base_model
from evald.trainer.publish import end_run, publish, skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.read(write_base_model(tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def node(root: Path, base: BaseModel) -> Node:
    return Node(root, base)


# --- what comes in -----------------------------------------------------------------------------


async def test_a_snapshot_becomes_a_point(node: Node) -> None:
    async with node.life() as intake:
        directory = snapshot(node.root / "step_4")
        point = await node.next_point()
        assert point.key == PointKey("run", 4)
        one = point.snapshot
        assert one.directory == directory
        assert one.owned
        assert one.digest is not None
        assert len(one.digest) == 32
        assert one.marker_time == pytest.approx(time.time(), abs=60)
        view = intake.view()
        assert (view.snapshots, view.used_bytes) == (1, one.size_bytes)
        assert view.free_bytes > 0
        await node.nothing_more()


async def test_what_the_sdk_publishes(node: Node) -> None:
    async with node.life():
        for step in range(3):
            publish(
                lambda directory: snapshot(directory, marker=None) and None,  # type: ignore[arg-type]
                node.root,
                step,
                run="sdk",
                final=step == 2,
                stall_s=0.5,
            )
        skip(node.root, 3, "export_failed", "disk full")
        end_run(node.root, 3)
        points = [await node.next_point() for _ in range(3)]
        assert [point.key.step for point in points] == [0, 1, 2]
        assert points[2].key.run == "sdk"
        assert [point.snapshot.final for point in points] == [False, False, True]
        assert points[0].snapshot.stall_s == 0.5
        skipped = await node.next()
        assert isinstance(skipped, TrainerSkip)
        assert (skipped.key, skipped.reason) == (PointKey("run", 3), "export_failed")
        end = await node.next()
        assert isinstance(end, RunEnded)
        assert (end.run, end.last_step) == ("run", 3)


async def test_run_folders_that_come_later(node: Node) -> None:
    async with node.life(scan_interval_s=30.0):
        (node.root / "second").mkdir()
        await asyncio.sleep(0.3)
        started = time.monotonic()
        snapshot(node.root / "second" / "step_1")
        assert (await node.next_point()).key == PointKey("second", 1)
        assert time.monotonic() - started < 15  # by its event, not by the interval


async def test_a_marker_is_seen_soon(node: Node) -> None:
    async with node.life(scan_interval_s=30.0):
        directory = snapshot(node.root / "step_1", marker=None)
        await asyncio.sleep(0.5)
        assert node.offers.empty()
        started = time.monotonic()
        (directory / ".complete").touch()
        await node.next_point()
        assert time.monotonic() - started < 15


async def test_what_lies_there_at_the_start_comes_in_order(node: Node) -> None:
    for age, step in enumerate([7, 3, 9]):
        directory = snapshot(node.root / f"step_{step}", marker=None)
        (directory / ".complete").touch()
        os.utime(directory / ".complete", (1000 + age, 1000 + age))
    async with node.life():
        assert [(await node.next_point()).key.step for _ in range(3)] == [7, 3, 9]


async def test_a_recreated_root_is_watched_again(node: Node) -> None:
    with capture_logs() as logs:
        async with node.life(scan_interval_s=0.2):
            shutil.rmtree(node.root)
            await asyncio.sleep(0.6)
            snapshot(node.root / "step_1")
            await node.next_point()
            snapshot(node.root / "step_2")
            await node.next_point()
    assert [entry["event"] for entry in logs].count("staging_root_lost") == 1


def test_uvloop_serves_it_too(root: Path, base: BaseModel) -> None:
    async def main() -> None:
        node = Node(root, base)
        async with node.life():
            snapshot(root / "step_1")
            await node.next_point()

    uvloop.run(main())


async def test_an_impossible_root_is_told(tmp_path: Path, base: BaseModel) -> None:
    (tmp_path / "file").touch()
    node = Node(tmp_path / "file" / "root", base)
    intake = Intake(
        node.config,
        run="run",
        base=base,
        index=node.index,
        retention=Retention(node.config),
        offer=node._offer,
    )
    with pytest.raises(EvaldError, match=r"cannot create staging root .*: Not a directory"):
        await intake.run()


async def test_a_root_that_cannot_be_scanned_is_told_once(tmp_path: Path, base: BaseModel) -> None:
    node = Node(tmp_path / "root", base)
    with capture_logs() as logs:
        async with node.life(scan_interval_s=0.1):
            shutil.rmtree(node.root)
            node.root.touch()
            await asyncio.sleep(0.5)
    told = [entry["detail"] for entry in logs if entry["event"] == "staging_root_lost"]
    assert told == [
        f"cannot scan staging root {node.root}: Not a directory; evald goes on when it can be read"
    ]


# --- revisions ---------------------------------------------------------------------------------


async def test_the_same_step_with_other_bytes_is_a_revision(node: Node) -> None:
    async with node.life():
        snapshot(node.root / "step_1", seed=1)
        await node.end(await node.next_point())
        shutil.rmtree(node.root / "step_1")
        snapshot(node.root / "step_1", seed=2)
        assert (await node.next_point()).key == PointKey("run", 1, 1)


async def test_the_same_step_with_equal_bytes_is_answered(node: Node) -> None:
    async with node.life(keep=0):
        snapshot(node.root / "step_1")
        await node.end(await node.next_point())
        await until(lambda: node.names == set())
        snapshot(node.root / "step_1")
        await until(lambda: node.names == set())
        assert node.offers.empty()


async def test_equal_bytes_wait_while_the_first_are_measured(node: Node) -> None:
    async with node.life(keep=0, scan_interval_s=0.2):
        snapshot(node.root / "step_1")
        point = await node.next_point()
        snapshot(node.root / "run" / "step_1")
        await asyncio.sleep(0.7)
        assert node.offers.empty()
        await node.end(point)
        await until(lambda: not (node.root / "run" / "step_1").exists())
        assert node.offers.empty()


async def test_bytes_that_came_back_wait_too(node: Node) -> None:
    async with node.life(scan_interval_s=0.2):
        directory = snapshot(node.root / "step_1")
        point = await node.next_point()
        (directory / ".complete").unlink()
        await asyncio.sleep(0.4)
        (directory / ".complete").touch()
        await asyncio.sleep(0.7)
        assert node.offers.empty()
        await node.end(point, Outcome.SKIPPED)  # as superseded: the marker is another one
        assert (await node.next_point()).key == PointKey("run", 1, 1)


async def test_large_copies_of_one_step_are_told_apart_by_their_digests(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_module, "_INLINE_BYTES", -1)
    for place, seed in (("step_1", 1), ("run/step_1", 2)):
        snapshot(node.root / place, seed=seed)
    async with node.life(keep=5):
        first, second = await node.next_point(), await node.next_point()
        assert (first.key, first.snapshot.digest) == (PointKey("run", 1), None)
        assert second.key == PointKey("run", 1, 1)
        assert second.snapshot.digest is not None
        await node.end(second)
        shutil.rmtree(first.snapshot.directory)
        snapshot(first.snapshot.directory, seed=2)
        await until(lambda: first.snapshot.directory in node.retention.kept)
        assert node.offers.empty()


async def test_a_large_copy_that_vanishes_before_its_digest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_module, "_INLINE_BYTES", -1)
    for place in ("step_1", "run/step_1"):
        snapshot(node.root / place)

    def vanish(directory: Path, *_: object, **__: object) -> str:
        shutil.rmtree(directory)
        raise FileNotFoundError

    monkeypatch.setattr(candidate_module, "content_digest", vanish)
    async with node.life():
        await node.next_point()
        await until(lambda: not (node.root / "run" / "step_1").exists())
        await node.nothing_more()


# --- faults ------------------------------------------------------------------------------------


async def test_an_invalid_snapshot_is_told_and_the_next_one_taken(node: Node) -> None:
    async with node.life(keep=0):
        directory = snapshot(node.root / "step_1", marker=None)
        os.truncate(directory / "model.safetensors", 5000)
        (directory / ".complete").touch()
        invalid = await node.next()
        assert isinstance(invalid, InvalidPoint)
        assert invalid.detail.startswith(f"cannot use snapshot {directory}: model.safetensors is t")
        assert invalid.point.key == PointKey("run", 1)
        assert invalid.point.snapshot.fingerprint
        await until(lambda: node.names == set())
        snapshot(node.root / "step_2")
        await node.next_point()
        # mended: the next revision
        snapshot(node.root / "step_1")
        assert (await node.next_point()).key == PointKey("run", 1, 1)


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("done", "marker .complete is neither empty nor a manifest"),
        ('{"step": 2}', "manifest of step 2"),
        (
            '{"files": {"model.safetensors": {"xxh3": "0000000000000000"}}}',
            "model.safetensors has hash",
        ),
    ],
)
async def test_a_bad_marker(node: Node, marker: str, sentence: str) -> None:
    async with node.life():
        directory = snapshot(node.root / "step_1", marker=None)
        (directory / ".complete").write_text(marker)
        invalid = await node.next()
        assert isinstance(invalid, InvalidPoint)
        assert sentence in invalid.detail


async def test_a_link_in_an_owned_root(node: Node, tmp_path: Path) -> None:
    outside = snapshot(tmp_path / "outside")
    async with node.life(keep=0):
        (node.root / "step_1").symlink_to(outside)
        invalid = await node.next()
        assert isinstance(invalid, InvalidPoint)
        assert "symbolic link" in invalid.detail
        await until(lambda: node.names == set())
    assert (outside / "model.safetensors").exists()


async def test_an_unowned_root_is_only_read(node: Node, tmp_path: Path) -> None:
    outside = snapshot(tmp_path / "outside")
    node.root.mkdir()
    (node.root / "step_1").symlink_to(outside)
    snapshot(node.root / "step_2")
    async with node.life(keep=0, owned=False):
        for _ in range(2):
            point = await node.next_point()
            assert not point.snapshot.owned
            await node.end(point)
        await node.nothing_more()
    assert {path.name for path in node.root.iterdir()} == {"step_1", "step_2"}


async def test_validation_can_be_switched_off(node: Node) -> None:
    async with node.life(validation="off"):
        (node.root / "step_1").mkdir()
        (node.root / "step_1" / "model.safetensors").write_text("junk")
        (node.root / "step_1" / ".complete").touch()
        await node.next_point()


async def test_a_marker_that_goes_is_no_point_until_it_returns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reader.judge

    def slow(self: Reader, *arguments: Any, **more: Any) -> None:
        monkeypatch.setattr(Reader, "judge", real)
        (node.root / "step_1" / ".complete").unlink()
        real(self, *arguments, **more)

    monkeypatch.setattr(Reader, "judge", slow)
    async with node.life(scan_interval_s=0.2):
        directory = snapshot(node.root / "step_1")
        await node.nothing_more()
        (directory / ".complete").touch()
        assert (await node.next_point()).key == PointKey("run", 1)


async def test_a_snapshot_that_vanishes_at_each_stage(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("look", "_validate", "hash"):
        real = getattr(Reader, stage)

        def vanish(self: Reader, one: Any, real: Any = real) -> Any:
            shutil.rmtree(one.directory)
            return real(self, one)

        with monkeypatch.context() as patch:
            patch.setattr(Reader, stage, vanish)
            async with node.life(scan_interval_s=0.2):
                snapshot(node.root / "step_1")
                await until(lambda: node.names == set())
                await asyncio.sleep(0.3)
    assert node.offers.empty()


async def test_a_slow_snapshot_delays_no_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reader.look

    def slow(self: Reader, found: FoundSnapshot) -> Any:
        if found.step == 1:
            time.sleep(1.5)
        return real(self, found)

    monkeypatch.setattr(Reader, "look", slow)
    async with node.life():
        snapshot(node.root / "step_1")
        await asyncio.sleep(0.3)
        snapshot(node.root / "step_2")
        assert (await node.next_point()).key.step == 2
        assert (await node.next_point()).key.step == 1


async def test_a_stop_does_not_wait_for_a_long_hash(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    def endless(*_: object, stop: Any, **__: object) -> str:
        stopped.append(stop.wait(20))
        raise HashingStopped("stopped")

    monkeypatch.setattr(candidate_module, "content_digest", endless)
    async with node.life():
        snapshot(node.root / "step_1")
        await asyncio.sleep(0.5)
    await until(lambda: stopped == [True])
