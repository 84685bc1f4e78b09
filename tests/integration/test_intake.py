"""The whole of staging on a real directory with real inotify; only the dispatcher is simple."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from structlog.testing import capture_logs

from evald.config import Staging
from evald.errors import EvaldError
from evald.point import EvalPoint, Kind, Outcome, PointKey, SkipReason
from evald.results.index import PointIndex
from evald.results.records import Accepted, PointRecord
from evald.staging import candidate as candidate_module
from evald.staging import intake as intake_module
from evald.staging.candidate import Reader
from evald.staging.digest import HashingStopped
from evald.staging.intake import Intake, check_snapshot
from evald.staging.offers import InvalidPoint, LostPoint, Offer, RunEnded, TrainerSkip
from evald.staging.retention import Retention
from evald.staging.scan import Found, FoundSnapshot, Layout, scan
from evald.staging.validate import BaseModel
from evald.testing import Tensor, model_tensors, write_base_model, write_snapshot
from evald.trainer.publish import end_run, publish, skip


@cache
def weights(seed: int) -> dict[str, Tensor]:
    return model_tensors(seed=seed)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.read(write_base_model(tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def snapshot(directory: Path, seed: int = 0, **arguments: Any) -> Path:
    return write_snapshot(directory, tensors=weights(seed), tokenizer=False, **arguments)


class Node:
    """An intake, and a dispatcher that accepts all and ends points when told to."""

    def __init__(self, root: Path, base: BaseModel, index: PointIndex | None = None) -> None:
        self.root = root
        self.base = base
        self.index = index or PointIndex()
        self.offers: asyncio.Queue[Offer] = asyncio.Queue()
        self.alerts: list[tuple[str, str]] = []
        self.config = Staging(root=str(root), scan_interval_s=0.5)
        self.seq = 0

    @asynccontextmanager
    async def life(self, **config: Any) -> AsyncIterator[Intake]:
        self.config = msgspec.structs.replace(self.config, **config)
        self.retention = Retention(self.config, on_alert=self._alert)
        intake = Intake(
            self.config,
            run="run",
            base=self.base,
            index=self.index,
            retention=self.retention,
            offer=self._offer,
            on_alert=self._alert,
            baseline_step=-1,
        )
        task = asyncio.create_task(intake.run())
        try:
            async with asyncio.timeout(10):
                await intake.armed.wait()
            yield intake
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
        assert task.cancelled(), task.exception()

    async def _alert(self, name: str, detail: str) -> None:
        self.alerts.append((name, detail))

    async def _offer(self, offer: Offer) -> None:
        match offer:
            case EvalPoint():
                self._accept(offer)
            case InvalidPoint(point=point):
                await self.end(point, Outcome.SKIPPED)
            case LostPoint(key=key):
                self._end(key, Outcome.SKIPPED)
            case TrainerSkip(key=key, path=path):
                self._end(key, Outcome.SKIPPED)
                path.unlink()
            case RunEnded(path=path):
                path.unlink()
        self.offers.put_nowait(offer)

    def _accept(self, point: EvalPoint) -> None:
        key, one = point.key, point.snapshot
        if self.index.get(key) is not None:
            return
        self.index.apply(
            Accepted(
                run=key.run,
                step=key.step,
                revision=key.revision,
                kind=key.kind,
                record_id=f"{key.record_id}/accepted",
                directory=str(one.directory),
                size_bytes=one.size_bytes,
                fingerprint=one.fingerprint,
                digest=one.digest,
                owned=one.owned,
            )
        )

    def _end(self, key: PointKey, outcome: Outcome, **fields: Any) -> None:
        self.seq += 1
        self.index.apply(
            PointRecord(
                seq=self.seq,
                run=key.run,
                step=key.step,
                revision=key.revision,
                kind=key.kind,
                record_id=key.record_id,
                outcome=outcome,
                **fields,
            )
        )

    async def end(self, point: EvalPoint, outcome: Outcome = Outcome.OK) -> None:
        one = point.snapshot
        self._end(
            point.key,
            outcome,
            directory=str(one.directory),
            fingerprint=one.fingerprint,
            digest=one.digest,
        )
        if one.owned:
            await self.retention.retire(one.directory, one.fingerprint)

    async def next(self) -> Offer:
        async with asyncio.timeout(20):
            return await self.offers.get()

    async def next_point(self) -> EvalPoint:
        offer = await self.next()
        assert isinstance(offer, EvalPoint), offer
        return offer

    async def nothing_more(self) -> None:
        await asyncio.sleep(1.2)
        assert self.offers.empty(), self.offers.get_nowait()

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()} - {".evald"}


@pytest.fixture
def node(root: Path, base: BaseModel) -> Node:
    return Node(root, base)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 (files change without an event)
            await asyncio.sleep(0.02)


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
        assert time.monotonic() - started < 5  # by its event, not by the interval


async def test_a_marker_is_seen_soon(node: Node) -> None:
    async with node.life(scan_interval_s=30.0):
        directory = snapshot(node.root / "step_1", marker=None)
        await asyncio.sleep(0.5)
        assert node.offers.empty()
        started = time.monotonic()
        (directory / ".complete").touch()
        await node.next_point()
        assert time.monotonic() - started < 2


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
            node.root.rmdir()
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


# --- retention ---------------------------------------------------------------------------------


async def test_the_ring_goes_on_after_a_restart(node: Node) -> None:
    async with node.life(keep=2):
        for step in range(3):
            snapshot(node.root / f"step_{step}", seed=step)
            await node.next_point()
    points = {state.key.step: state for state in node.index.open_points()}
    for step in (2, 0):  # ended, but the daemon died before it could retire them
        node._end(points[step].key, Outcome.OK, fingerprint=points[step].fingerprint, digest="d")
    (node.root / ".evald" / "trash" / "step_9.x").mkdir(parents=True)
    async with node.life():
        assert (await node.next_point()).key.step == 1
        await until(lambda: len(node.retention.kept) == 2)
        assert [path.name for path in node.retention.kept] == ["step_2", "step_0"]
        assert list((node.root / ".evald" / "trash").iterdir()) == []
        snapshot(node.root / "step_3")
        await node.end(await node.next_point())
        await until(lambda: node.names == {"step_0", "step_1", "step_3"})
    assert node.alerts == []


async def test_a_snapshot_that_cannot_be_deleted_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "evald.staging.alerts.deletable", lambda *_, **__: "cannot delete step_1: mode"
    )
    async with node.life():
        for step in range(2):
            snapshot(node.root / f"step_{step}")
            await node.next_point()
    assert node.alerts == [("snapshot_not_deletable", "cannot delete step_1: mode")]


async def test_a_directory_that_hides_its_marker_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evald.staging import scan as scan_module  # noqa: PLC0415 (to be patched)

    def closed(self: Any, directory: Path, *_: object) -> None:
        self.closed.append(directory)

    monkeypatch.setattr(scan_module._Look, "_snapshot", closed)
    async with node.life(scan_interval_s=0.1):
        (node.root / "step_1").mkdir(mode=0o700)
        await until(lambda: bool(node.alerts))
        await asyncio.sleep(0.5)
    ((name, detail),) = node.alerts
    assert name == "snapshot_closed"
    assert f"cannot look into {node.root}/step_1: its mode is 0700" in detail


# --- an earlier life ---------------------------------------------------------------------------


async def test_an_open_point_comes_again_under_its_key(node: Node) -> None:
    async with node.life():
        snapshot(node.root / "step_1")
        first = await node.next_point()
    async with node.life():
        assert await node.next_point() == first
        await node.nothing_more()


async def test_open_points_without_bytes_are_lost(node: Node) -> None:
    async with node.life():
        for step in range(3):
            snapshot(node.root / f"step_{step}")
            await node.next_point()
    shutil.rmtree(node.root / "step_0")
    shutil.rmtree(node.root / "step_1")
    snapshot(node.root / "step_1", seed=5)
    async with node.life():
        offers = [await node.next() for _ in range(4)]
        points = {one.key for one in offers if isinstance(one, EvalPoint)}
        lost = {one.key.step: one for one in offers if isinstance(one, LostPoint)}
        assert points == {PointKey("run", 1, 1), PointKey("run", 2)}
        assert {step: one.reason for step, one in lost.items()} == {
            0: SkipReason.CKPT_MISSING,
            1: SkipReason.SUPERSEDED,
        }
        assert "step_0 of run:step:0.r0 any more" in lost[0].detail
        await node.nothing_more()


async def test_equal_bytes_written_anew_keep_the_point(node: Node) -> None:
    async with node.life():
        snapshot(node.root / "step_1")
        first = await node.next_point()
    shutil.rmtree(node.root / "step_1")
    snapshot(node.root / "step_1")
    async with node.life():
        again = await node.next_point()
        assert again.key == first.key
        assert again.snapshot.fingerprint != first.snapshot.fingerprint
        await node.nothing_more()


# --- words of the trainer ----------------------------------------------------------------------


def request(node: Node, **content: Any) -> Path:
    path = node.root / "ask.request"
    path.write_text(json.dumps(content))
    return path


async def test_a_baseline_is_asked_for(node: Node) -> None:
    async with node.life():
        path = request(node, kind="baseline")
        point = await node.next_point()
        assert point.key == PointKey("run", -1, 0, Kind.BASELINE)
        assert point.snapshot.directory == node.base.directory
        assert not point.snapshot.owned
        await until(lambda: not path.exists())
    async with node.life():  # open, and its request is consumed
        assert (await node.next_point()).key == point.key
        await node.end(point)
        request(node, kind="baseline")
        await until(lambda: not path.exists())
        assert node.offers.empty()


async def test_a_request_whose_directory_changes_or_goes(node: Node, tmp_path: Path) -> None:
    outside = snapshot(tmp_path / "outside")
    async with node.life():
        path = request(node, kind="reuse", step=8, path=str(outside))
        assert (await node.next_point()).key == PointKey("run", 8)
        await until(lambda: not path.exists())
    (outside / "more").touch()
    async with node.life():
        lost = await node.next()
        assert isinstance(lost, LostPoint)
        assert lost.reason is SkipReason.SUPERSEDED
        path = request(node, kind="reuse", step=9, path="../outside")
        assert (await node.next_point()).key == PointKey("run", 9)
        await until(lambda: not path.exists())
    shutil.rmtree(outside)
    async with node.life():
        lost = await node.next()
        assert isinstance(lost, LostPoint)
        assert lost.reason is SkipReason.CKPT_MISSING


async def test_a_request_for_nothing_is_invalid(node: Node) -> None:
    async with node.life():
        path = request(node, kind="reuse", step=8, path="/no/where")
        invalid = await node.next()
        assert isinstance(invalid, InvalidPoint)
        assert "there is no such directory" in invalid.detail
        await until(lambda: not path.exists())


async def test_requests_of_an_unowned_root_stay(node: Node) -> None:
    node.root.mkdir()
    path = request(node, kind="baseline")
    async with node.life(owned=False):
        await node.end(await node.next_point())
        await node.nothing_more()
    async with node.life():
        await node.nothing_more()
    assert path.exists()


async def test_broken_words_are_told_once_and_stay(node: Node) -> None:
    with capture_logs() as logs:
        async with node.life(scan_interval_s=0.1):
            (node.root / "step_1.skip").write_text('{"reas')
            (node.root / "run.end").write_text("x")
            await asyncio.sleep(1)
            assert node.names == {"step_1.skip", "run.end"}
            (node.root / "step_1.skip").write_text('{"reason": "busy"}')
            assert isinstance(await node.next(), TrainerSkip)
    told = [entry["detail"] for entry in logs if entry["event"] == "staging_file_ignored"]
    assert len(told) == 2
    assert any("step_1.skip" in detail for detail in told)


async def test_a_word_that_vanishes_before_it_is_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(path: Path, *_: object) -> object:
        path.unlink()
        raise FileNotFoundError

    monkeypatch.setattr("evald.staging.words.read_word", vanish)
    async with node.life(scan_interval_s=0.1):
        (node.root / "step_1.skip").write_text('{"reason": "busy"}')
        await until(lambda: node.names == set())
        await asyncio.sleep(0.3)
    assert node.offers.empty()


async def test_a_run_ends_after_its_last_snapshot(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reader.look

    def slow(self: Reader, found: FoundSnapshot) -> Any:
        time.sleep(1)
        return real(self, found)

    monkeypatch.setattr(Reader, "look", slow)
    async with node.life():
        snapshot(node.root / "step_1")
        (node.root / "run.end").write_text('{"last_step": 1}')
        await node.next_point()
        assert isinstance(await node.next(), RunEnded)


async def test_a_marker_that_one_scan_missed_comes_before_the_runs_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[Path] = []

    def racing(layout: Layout) -> Found:
        found = scan(layout)
        if found.files and not raced:  # the root was listed after the marker was looked for
            raced.append(snapshot(node.root / "step_1"))
        return found

    monkeypatch.setattr(intake_module, "scan", racing)
    async with node.life(scan_interval_s=30.0):
        (node.root / "run.end").write_text('{"last_step": 1}')
        assert (await node.next_point()).key.step == 1
        assert isinstance(await node.next(), RunEnded)


async def test_an_older_request_comes_before_a_snapshot(node: Node) -> None:
    node.root.mkdir()
    request(node, kind="baseline")
    os.utime(node.root / "ask.request", (1000, 1000))
    snapshot(node.root / "step_0")
    async with node.life():
        kinds = [(await node.next_point()).key.kind for _ in range(2)]
    assert kinds == [Kind.BASELINE, Kind.STEP]


async def test_a_request_that_cannot_be_removed_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with capture_logs() as logs:
        async with node.life(scan_interval_s=0.1):
            monkeypatch.setattr(Path, "unlink", refuse)
            request(node, kind="baseline")
            await node.next_point()
            await until(lambda: any(entry["event"] == "staging_file_kept" for entry in logs))
    monkeypatch.undo()


# --- one directory, no root --------------------------------------------------------------------


@pytest.fixture
def checked(base: BaseModel) -> Callable[..., str | None]:
    return lambda directory, **config: check_snapshot(
        Staging(root="/none", **config), directory, base
    )


def test_one_directory_can_be_checked(tmp_path: Path, checked: Callable[..., str | None]) -> None:
    directory = snapshot(tmp_path / "s", marker=None)
    assert checked(directory) is None
    (directory / ".complete").write_text('{"step": 3, "files": {"config.json": {"size": 1}}}')
    assert "the manifest says 1" in (checked(directory) or "")
    (directory / ".complete").write_text('{"files": {"config.json": {"xxh3": "%s"}}}' % ("0" * 16))
    assert "config.json has hash" in (checked(directory) or "")
    assert checked(directory, validation="off") is None
    assert checked(tmp_path / "gone") == f"cannot use snapshot {tmp_path}/gone: no such directory"
