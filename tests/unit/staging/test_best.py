"""The best snapshot of a run is copied before it is given up."""

import asyncio
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from staging_cases import MARKER, snapshot, staging

from evald.config import KeepBest
from evald.point import EvalPoint, Kind, Outcome, PointKey, Snapshot
from evald.results.records import PointRecord, decode
from evald.staging import best as module
from evald.staging import best_copy
from evald.staging.best import BestKeeper
from evald.staging.digest import content_digest, fingerprint
from evald.staging.files import list_files
from evald.staging.retention import Retention
from evald.text import encode_json


class World:
    """A staging root whose ended snapshots go at once, and a directory for the best one."""

    def __init__(self, path: Path, *, keep: int = 0, **config: Any) -> None:
        self.root, self.dir, self.results = path / "root", path / "best", path / "results.jsonl"
        self.alerts: list[tuple[str, str]] = []
        self.keeper = BestKeeper(
            KeepBest(**{"metric": "eval/a", "dir": str(self.dir), **config}),
            marker=MARKER,
            results_file=self.results,
            on_alert=self._hear,
        )
        self.retention = Retention(staging(self.root, keep=keep), best=self.keeper)

    async def _hear(self, name: str, detail: str) -> None:
        self.alerts.append((name, detail))

    def point(self, step: int, run: str = "r", **fields: Any) -> EvalPoint:
        directory = self.root / f"step_{step}"
        if not directory.exists():
            snapshot(directory)
            (directory / "weights").write_text(f"of step {step}")
            (directory / "folder").mkdir()
            (directory / "folder" / "file").write_text("text")
            (directory / "evald_record.json").write_text("of a base model that was a best one")
            (directory / "optimizer.pt").write_text("to resume from")
            (directory / MARKER).touch()
        known = {"run": run, "step": step, "directory": directory, "size_bytes": 1}
        known["fingerprint"] = fingerprint(directory, MARKER)[0]
        return EvalPoint(PointKey(run, step), Snapshot(**{**known, **fields}))

    def record(self, step: int, value: float | None, run: str = "r", **fields: Any) -> PointRecord:
        metrics = {} if value is None else {"eval/a": value}
        known = {"outcome": Outcome.OK, "record_id": PointKey(run, step).record_id}
        return PointRecord(run=run, step=step, metrics=metrics, **{**known, **fields})

    async def end(self, step: int, value: float | None, **fields: Any) -> None:
        await self.retention.end(self.point(step), self.record(step, value, **fields))

    def staged(self) -> set[str]:
        return {path.name for path in self.root.glob("step_*")}

    def kept(self, run: str = "r") -> tuple[int, float]:
        """Step and value of the best one; checks that it is whole."""
        best = self.dir / run / "best"
        record = decode((best / "evald_record.json").read_bytes())
        assert isinstance(record, PointRecord)
        assert (best / "weights").read_text() == f"of step {record.step}"
        assert (best / "folder" / "file").read_text() == "text"
        assert not (best / "optimizer.pt").exists()
        names = {path.name for path in best.parent.iterdir()}
        assert names == {"best", "best_by.txt", best.readlink().name}
        return record.step, record.metrics["eval/a"]


@pytest.mark.parametrize(("rule", "kept"), [("max", [1, 2, 2, 4, 4]), ("min", [1, 1, 1, 1, 5])])
async def test_the_best_one_by_the_rule_stays(tmp_path: Path, rule: str, kept: list[int]) -> None:
    world = World(tmp_path, rule=rule)
    for step, value in enumerate([0.1, 0.5, 0.5, 0.7, 0.05], start=1):
        await world.end(step, value)
        assert world.kept()[0] == kept[step - 1]
        assert not (world.root / f"step_{step}").exists()
    assert world.alerts == []


async def test_the_copy_has_the_snapshots_bytes(tmp_path: Path) -> None:
    world = World(tmp_path)
    point = world.point(1)
    (point.snapshot.directory / "evald_record.json").unlink()
    point = world.point(1)
    digest = content_digest(point.snapshot.directory, MARKER)
    await world.retention.end(point, world.record(1, 1.0))
    best = world.dir / "r" / "best"
    (best / "evald_record.json").unlink()
    assert content_digest(best.resolve(), MARKER) == digest
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in best.iterdir() if path.is_file())


async def test_what_does_not_compete(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.end(1, 0.9, outcome=Outcome.PARTIAL)
    await world.end(2, 0.9, outcome=Outcome.SKIPPED)
    await world.end(3, 0.9, kind=Kind.BASELINE)
    shared = world.point(4, weight_version="v")
    await world.retention.end(shared, world.record(4, 0.9))
    assert not world.dir.exists()
    for step in (5, 6):
        await world.end(step, None if step == 5 else float("nan"))
    ((name, detail),) = world.alerts  # told once
    assert name == "best_not_known"
    assert "r/step/5/r0 has no metric eval/a" in detail


async def test_runs_have_their_own_and_unowned_roots_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.end(1, 0.9)
    other = world.point(2, run="other", owned=False)
    await world.retention.end(other, world.record(2, 0.1, run="other"))
    assert (world.kept(), world.kept("other")) == ((1, 0.9), (2, 0.1))
    assert (world.root / "step_2").exists()


async def test_another_life_copies_what_the_last_one_did_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    point, record = world.point(1), world.record(1, 0.9)
    record.seq = 1
    world.results.write_bytes(encode_json(record) + b"\n")
    place = world.dir / "r"
    cut_short = place / ".tmp-step_1.r0.0123abcd"  # killed in mid-copy
    cut_short.mkdir(parents=True)
    (cut_short / "weights").write_text("of")
    (place / "step_7.r0").mkdir()  # killed between the rename and the link
    (place / "step_7.r0" / "evald_record.json").write_bytes(b"{}")
    (place / "mine").mkdir()
    one = point.snapshot
    for _ in range(2):
        await world.retention.end_again(point.key, one.directory, one.fingerprint, owned=False)
    (place / "mine").rmdir()
    assert world.kept() == (1, 0.9)
    await world.retention.end_again(PointKey("r", 9), one.directory, one.fingerprint, owned=True)
    assert not one.directory.exists()


async def test_the_same_name_of_another_ledger(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.end(1, 0.1)
    await world.end(1, 0.2)
    assert world.kept() == (1, 0.2)


class FullDisk:
    """Copies of some steps find no room, for as long as ``full``."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        real = os.write

        def write(descriptor: int, data: bytes) -> int:
            target = Path(f"/proc/self/fd/{descriptor}").readlink()
            if self.full and target.is_relative_to(world.dir):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_copy_that_fails_is_owed_and_its_snapshot_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.end(1, 0.1)
    disk = FullDisk(world, monkeypatch)
    retrying = asyncio.create_task(world.retention.retry_best())
    await world.end(2, 0.2)
    await world.end(3, 0.15)
    assert world.kept() == (1, 0.1)
    ((name, detail),) = world.alerts
    assert name == "best_not_kept"
    assert "No space left on device; see to keep_best.dir" in detail
    assert world.staged() == {"step_2"}  # the points are over all the same
    await asyncio.sleep(0.1)  # some more tries
    disk.full = False
    await until(lambda: world.staged() == set())
    assert world.kept() == (2, 0.2)
    assert len(world.alerts) == 1
    retrying.cancel()


async def test_only_the_best_of_those_that_are_owed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    disk = FullDisk(world, monkeypatch)
    for step, value in enumerate([0.1, 0.5, 0.4, 0.7, 0.6], start=1):
        await world.end(step, value)
    assert world.staged() == {"step_4"}
    assert len(world.alerts) == 1
    disk.full = False
    await world.end(6, 0.8)
    assert world.kept() == (6, 0.8)
    assert world.staged() == set()
    disk.full = True
    await world.end(7, 0.9)
    assert len(world.alerts) == 2  # it had been well again


async def test_what_is_held_does_not_count_against_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, keep=1)
    FullDisk(world, monkeypatch)
    for step, value in enumerate([0.9, 0.2, 0.3], start=1):
        await world.end(step, value)
    assert world.staged() == {"step_1", "step_3"}


async def test_another_life_owes_what_the_last_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    disk = FullDisk(world, monkeypatch)
    records = [world.record(step, value) for step, value in ((1, 0.9), (2, 0.1))]
    for seq, record in enumerate(records, start=1):
        record.seq = seq
    world.results.write_bytes(b"".join(encode_json(record) + b"\n" for record in records))
    points = [world.point(1), world.point(2)]
    for point in points:
        one = point.snapshot
        await world.retention.end_again(point.key, one.directory, one.fingerprint, owned=True)
    assert world.staged() == {"step_1"}
    retrying = asyncio.create_task(world.retention.retry_best())
    disk.full = False
    await until(lambda: world.staged() == set())
    assert world.kept() == (1, 0.9)
    retrying.cancel()


async def test_what_is_owed_and_lost_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    FullDisk(world, monkeypatch)
    await world.end(1, 0.9)
    shutil.rmtree(world.root / "step_1")
    retrying = asyncio.create_task(world.retention.retry_best())
    await until(lambda: len(world.alerts) == 2)
    assert "it has vanished" in world.alerts[1][1]
    retrying.cancel()
    await world.end(2, 0.1)
    assert world.staged() == {"step_2"}  # the best one now


async def test_no_room_is_known_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_copy, "_MARGIN_BYTES", 1 << 60)
    world = World(tmp_path)
    await world.end(1, 0.1)
    assert "are free there" in world.alerts[0][1]
    assert list((world.dir / "r").iterdir()) == []
    assert world.staged() == {"step_1"}


async def test_what_changed_since_it_was_measured_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    point = world.point(1)
    stale = msgspec.structs.replace(point.snapshot, fingerprint="of older bytes")
    await world.keeper.consider(world.record(1, 0.1), stale)
    assert "no longer what was measured" in world.alerts.pop()[1]

    def changing(directory: Path) -> Any:
        files = list_files(directory)
        (directory / "weights").write_text("of step 2")
        return files

    monkeypatch.setattr("evald.staging.best_copy.list_files", changing)
    await world.keeper.consider(world.record(1, 0.1), point.snapshot)
    assert "changed while it was copied" in world.alerts.pop()[1]
    assert list((world.dir / "r").iterdir()) == []


async def test_two_daemons_copy_into_a_folder_in_turn(tmp_path: Path) -> None:
    world, place = World(tmp_path), tmp_path / "best" / "r"
    place.mkdir(parents=True)
    (place / ".tmp-step_9.r0.0123abcd").mkdir()
    other = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        ending = asyncio.create_task(world.end(1, 0.1))
        await asyncio.sleep(0.3)
        # what the other one copies is left alone
        assert [path.name for path in place.iterdir()] == [".tmp-step_9.r0.0123abcd"]
    finally:
        os.close(other)
    await ending
    assert {path.name for path in place.iterdir()} == {"best", "best_by.txt", "step_1.r0"}
    assert world.alerts == []


async def test_a_stop_ends_a_copy_early(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.keeper.close()
    await world.end(1, 0.1)
    assert world.alerts == []
    assert list((world.dir / "r").iterdir()) == []
    assert world.staged() == {"step_1"}  # for the next life


async def test_a_reader_always_finds_a_whole_one(tmp_path: Path) -> None:
    world, done, seen = World(tmp_path), threading.Event(), set()
    await world.end(0, 0.0)

    link = world.dir / "r" / "best"

    def read() -> None:
        while not done.is_set():
            before = link.readlink()
            names = {path.name for path in link.glob("*")}
            if before == link.readlink():  # else it may have been deleted meanwhile
                seen.add({"weights", "evald_record.json", "folder"} <= names)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 20):
            await world.end(step, step / 100)
    finally:
        done.set()
        reader.join()
    assert seen == {True}


async def test_another_rule_in_the_same_folder_is_refused_and_told_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.end(1, 0.5)
    other = World(tmp_path, rule="min")
    for step in (2, 3):
        await other.end(step, 0.1)
    assert world.kept() == (1, 0.5)
    ((name, detail),) = other.alerts
    assert name == "best_not_kept"
    assert detail == (
        f"cannot keep the best snapshot by min eval/a in {world.dir}/r: it has the best by max "
        f"eval/a; choose another keep_best.dir, or delete {world.dir}/r/best_by.txt"
    )
    assert other.staged() == set()  # nothing is held for it
    (world.dir / "r" / "best_by.txt").unlink()
    await other.end(4, 0.1)
    assert other.kept() == (4, 0.1)


async def test_nothing_behind_a_link_is_deleted(tmp_path: Path) -> None:
    world, outside = World(tmp_path), tmp_path / "outside"
    for name in ("step_1.r0", ".tmp-step_2.r0.0123abcd"):
        (outside / name).mkdir(parents=True)
        (outside / name / "evald_record.json").write_text("somebody's")
    world.dir.mkdir()
    (world.dir / "r").symlink_to(outside)
    await world.end(3, 0.5)
    ((_, detail),) = world.alerts
    assert f"in {world.dir}/r: {world.dir}/r is a symbolic link, or no folder; see to" in detail
    # nor behind one that takes the folder's place meanwhile
    (world.dir / "r").unlink()
    folder = world.dir / "r"
    real = best_copy._take_turn

    def swap(*arguments: Any) -> None:
        real(*arguments)
        folder.rename(world.dir / "moved")
        folder.symlink_to(outside)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(best_copy, "_take_turn", swap)
        await world.end(4, 0.6)
    assert len(list(outside.rglob("evald_record.json"))) == 2
    assert (world.dir / "moved" / "best" / "weights").read_text() == "of step 4"
