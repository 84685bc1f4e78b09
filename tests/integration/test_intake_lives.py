"""Staging over time: retention, restarts and the trainer's words, with real inotify."""

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from staging_node import Node, snapshot, until
from structlog.testing import capture_logs

from evald.config import Staging
from evald.point import EvalPoint, Kind, Outcome, PointKey, SkipReason
from evald.staging import intake as intake_module
from evald.staging.candidate import Reader
from evald.staging.files import open_file
from evald.staging.intake import check_snapshot
from evald.staging.offers import InvalidPoint, LostPoint, RunEnded, TrainerSkip
from evald.staging.scan import Found, FoundSnapshot, Layout, scan
from evald.staging.validate import BaseModel
from evald.testing import write_base_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.read(write_base_model(tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def node(root: Path, base: BaseModel) -> Node:
    return Node(root, base)


# --- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step_4.skip", "run.end"])
async def test_a_word_that_cannot_be_read_for_a_while_is_not_lost(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Found by chaos: an I/O error at two scans in a row cost the step its record."""
    refusals = iter(range(5))

    def failing(path: Path) -> Any:
        if path.name == name and next(refusals, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(path)

    monkeypatch.setattr("evald.staging.words.open_file", failing)
    async with node.life(scan_interval_s=0.05):
        said = '{"last_step": 4}' if name == "run.end" else '{"reason": "export_failed"}'
        (node.root / name).write_text(said)
        assert isinstance(await node.next(), TrainerSkip | RunEnded)
        assert next(refusals, None) is None


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


async def test_what_another_ledger_has_ended_is_no_point_of_this_one(
    node: Node, base: BaseModel
) -> None:
    async with node.life(keep=2):
        for step in (1, 2, 3):
            snapshot(node.root / f"step_{step}", seed=step)
            point = await node.next_point()
            if step < 3:
                await node.end(point)
    again = Node(node.root, base)  # another results directory
    snapshot(node.root / "step_1", seed=7)  # rewritten: of the new run
    with capture_logs() as logs:
        async with again.life(keep=2):
            found = {(await again.next_point()).key.step for _ in range(2)}
            assert found == {1, 3}
            await until(lambda: again.retention.kept == [node.root / "step_2"])
            snapshot(node.root / "step_2", seed=8)
            assert (await again.next_point()).key.step == 2
    told = [line for line in logs if line["event"] == "snapshot_answered_before"]
    assert [line["point"] for line in told] == ["run:step:2.r0"]


async def test_a_snapshot_that_cannot_be_deleted_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "evald.staging.notices.deletable", lambda *_, **__: "cannot delete step_1: mode"
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

    def closed(self: Any, directory: Path, step: int, run: str | None) -> None:
        self.closed[directory] = scan_module.Unfinished(step, run)

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
        again = await node.next_point()
        assert again.key == first.key
        # not validated again
        known = msgspec.structs.replace(first.snapshot, validate_s=0.0)
        assert again.snapshot == known
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


async def test_a_request_that_replaces_one_before_that_is_consumed_is_read(
    node: Node, tmp_path: Path
) -> None:
    first, second = snapshot(tmp_path / "first"), snapshot(tmp_path / "second", seed=1)
    async with node.life(scan_interval_s=0.1):
        path = request(node, kind="reuse", step=8, path=str(first))
        assert (await node.next_point()).key == PointKey("run", 8)
        # the first one is accepted, but its file is still there
        request(node, kind="reuse", step=9, path=str(second))
        assert (await node.next_point()).key == PointKey("run", 9)
        await until(lambda: not path.exists())


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
    assert sorted(node.alerts) == sorted(("staging_file_ignored", detail) for detail in told)


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


async def test_a_request_that_cannot_be_removed_is_told_and_removed_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path, path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with capture_logs() as logs:
        async with node.life(scan_interval_s=0.1):
            monkeypatch.setattr("evald.staging.retention.folder_of", refuse)
            request(node, kind="baseline")
            await node.next_point()
            await until(lambda: any(entry["event"] == "staging_file_kept" for entry in logs))
            monkeypatch.undo()
            # found by chaos: it lay there until the next start
            await until(lambda: not (node.root / "ask.request").exists())
    told = [entry for entry in logs if entry["event"] == "staging_file_kept"]
    assert [entry["log_level"] for entry in told].count("warning") == 1


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
