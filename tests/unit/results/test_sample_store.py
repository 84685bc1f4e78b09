"""Samples of ended points: compressed, read all the same, and deleted when they are too many."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledger_cases import accepted, config, ended
from structlog.testing import capture_logs

from evald.evals.stats.samples import read_samples
from evald.point import Kind, PointKey
from evald.results.compressed import compress, open_samples, stored_file
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.results.records import RunEnd
from evald.results.sample_store import SampleStore
from evald.results.samples import SampleJournal, SampleRecord, sample_file
from evald.results.stored_samples import StoredSamples
from evald.trainer.links.file_link import FileLink

SIZE = 50_000


class World:
    """A store over points 0, 1, ... of run "a", each with one set of samples."""

    def __init__(self, directory: Path, steps: int, **changes: Any) -> None:
        self.config = config(directory, **changes)
        self.results = Path(self.config.dir)
        self.index = PointIndex()
        self.open: set[PointKey] = set()
        self.store = SampleStore(
            self.config, index=self.index, is_open=lambda key: key in self.open
        )
        for step in range(steps):
            self.add(step)

    def add(self, step: int, *, kind: Kind = Kind.STEP) -> None:
        path = self.path(step, kind)
        journal = SampleJournal(path.parent, "toy")
        for number in range(2):
            # noise: what compresses to nothing would be no measure of sizes
            response = os.urandom(SIZE // 4).hex()
            journal.append(
                SampleRecord(
                    question=str(number),
                    sample=0,
                    digest="d",
                    config="c",
                    status="scored",
                    score=1.0,
                    response=response,
                )
            )
        journal.close()
        record = ended(step)
        record.kind, record.seq = kind, step + 1
        self.index.apply(record)

    def path(self, step: int, kind: Kind = Kind.STEP) -> Path:
        return sample_file(self.results, PointKey("a", step, 0, kind), "toy")

    def stored(self) -> dict[int, str]:
        """Return by step what its samples are: "jsonl" or "gz"."""
        found = {}
        for step in range(20):
            path = stored_file(self.path(step))
            if path is not None:
                found[step] = path.suffix[1:]
        return found

    def stored_bytes(self) -> int | None:
        return self.store.stored_bytes

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.store.look()


async def test_samples_are_compressed_at_the_second_look_and_read_as_before(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    plain = world.path(0).read_bytes()
    modified = world.path(0).stat().st_mtime_ns
    await world.look(1)
    assert world.stored() == {0: "jsonl", 1: "jsonl"}
    assert world.stored_bytes() is None
    world.add(2)
    await world.look(1)
    sizes = [path.stat().st_size for s in (0, 1) if (path := stored_file(world.path(s)))]
    assert world.stored_bytes() == sum(sizes)
    assert world.stored() == {0: "gz", 1: "gz", 2: "jsonl"}
    packed = stored_file(world.path(0))
    assert packed is not None
    assert gzip.decompress(packed.read_bytes()) == plain
    assert packed.stat().st_mtime_ns == modified
    assert sorted(path.name for path in packed.parent.iterdir()) == ["toy.jsonl.gz"]
    with open_samples(world.path(0)) as file:
        assert file.read() == plain
    assert read_samples(world.path(0), "d", "c").keys() == {"0", "1"}
    stored = StoredSamples(world.path(0), "d", "c", n_samples=1)
    assert stored.count() == 2
    assert [len(batch) for batch in stored.batches()] == [2]
    link = FileLink(world.results, world.results)
    samples = link.samples("a/step/0/r0", "toy")
    assert samples == [msgspec.json.decode(line) for line in plain.splitlines()]
    assert link.samples("a/step/9/r0", "toy") is None


async def test_the_oldest_beyond_the_limit_go_and_what_is_compared_with_stays(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 0, samples_max_gb=1.3 * SIZE / 1e9)
    world.add(0, kind=Kind.BASELINE)
    for step in range(1, 6):
        world.add(step)
    await world.look()
    assert stored_file(world.path(0, Kind.BASELINE)) is not None
    assert list(world.stored()) == [5]  # two in all: with the baseline
    # a run that is over is compared with nothing any more
    world.index.apply(RunEnd(run="a", step=5, record_id="a/run_end", points={}))
    world.store._config = config(tmp_path, samples_max_gb=SIZE / 2e9)
    await world.look(1)
    assert world.stored() == {}
    assert not world.path(0, Kind.BASELINE).parent.exists()


async def test_what_is_too_old_goes(tmp_path: Path) -> None:
    world = World(tmp_path, 3, samples_keep_days=2.0)
    for step, days in ((0, 2.1), (1, 1.9), (2, 100.0)):
        old = time.time() - days * 86_400
        os.utime(world.path(step), (old, old))
    await world.look()
    assert list(world.stored()) == [1, 2]  # the next point is compared with 2
    assert not world.path(0).parent.exists()


async def test_open_points_and_what_is_no_points_are_never_touched(tmp_path: Path) -> None:
    world = World(tmp_path, 2, samples_max_gb=1e-9)
    world.index.apply(accepted(7))
    journal = world.path(7)
    journal.parent.mkdir()
    journal.write_text("{}\n")
    world.open = {PointKey("a", 0)}
    regrade = journal.parent.with_name(".regrade-step_0")
    stranger = journal.parent.with_name("step_99.r0")
    for directory in (regrade, stranger):
        directory.mkdir()
        (directory / "toy.jsonl").write_text("{}\n")
    await world.look(3)
    assert world.stored() == {0: "jsonl", 1: "gz", 7: "jsonl"}
    for directory in (regrade, stranger):
        assert (directory / "toy.jsonl").exists()


async def test_a_disk_without_room_is_told_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 1)
    plain = world.path(0).read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with capture_logs() as logs, monkeypatch.context() as fault:
        fault.setattr(os, "fsync", full)
        await world.look(4)
    assert [one["event"] for one in logs] == ["samples_not_tidied"]
    assert world.path(0).read_bytes() == plain
    assert [path.name for path in world.path(0).parent.iterdir()] == ["toy.jsonl"]
    await world.look(1)
    assert world.stored() == {0: "gz"}


async def test_a_stop_ends_a_look_early(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    await world.look(1)
    world.store.close()
    await world.look(1)
    assert world.stored() == {0: "jsonl", 1: "jsonl"}


async def test_samples_that_a_person_has_deleted_are_no_fault(tmp_path: Path) -> None:
    world = World(tmp_path, 3, samples_max_gb=0.8 * SIZE / 1e9)
    world.path(0).unlink()
    with capture_logs() as logs:
        await world.look()
        world.path(1).parent.rename(tmp_path / "elsewhere") if world.path(1).exists() else None
        await world.look(2)
    assert list(world.stored()) == [2]
    assert "samples_not_tidied" not in [one["event"] for one in logs]


def test_damaged_samples_are_an_oserror(tmp_path: Path) -> None:
    path = tmp_path / "toy.jsonl"
    path.write_bytes(os.urandom(200_000).hex().encode() + b"\n")
    assert compress(path, Modes(), lambda: False)
    packed = tmp_path / "toy.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-2000])
    with open_samples(path) as file, pytest.raises(OSError, match="is damaged"):
        file.read()
    with open_samples(path) as file, pytest.raises(OSError, match="is damaged"):
        list(file)


async def test_a_point_that_cannot_be_compressed_does_not_hold_up_the_others(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 3)
    for step in range(2):
        (world.path(step).parent / "somebodys").mkdir()
    await world.look(3)
    assert world.stored()[2] == "gz"
