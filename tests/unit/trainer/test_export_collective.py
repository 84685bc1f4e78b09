"""Several ranks: they share the writing, and one that fails takes nobody with it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_same, assert_valid, names, saved, stored, untied

from evald.testing import FakeRanks
from evald.trainer.contract import ExportError, NoSpace, PeerLost
from evald.trainer.export import SnapshotExporter, export_snapshot
from evald.trainer.export.lanes import lanes_per_rank, order
from evald.trainer.export.pieces import one_to_one
from evald.trainer.export.shards import ShardWriter, plan_files

SHARD_BYTES = 60_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(untied(), tmp_path_factory.mktemp("base"))


def export(
    ranks: list[FakeRanks],
    root: Path,
    base: Path,
    weights: Callable[[int], Any] | None = None,
    **options: Any,
) -> list[Path | Exception]:
    """Export a model on every rank, or what ``weights`` returns for a rank."""
    model = untied()

    def on_one(rank: FakeRanks) -> Path:
        given: dict[str, Any] = {"step": 5, "base_dir": base, "max_shard_bytes": SHARD_BYTES}
        given |= options
        return export_snapshot(weights(rank.rank) if weights else model, root, ranks=rank, **given)

    return FakeRanks.on_all(ranks, on_one)


def written(rank: FakeRanks) -> set[str]:
    """Names of the files that a rank has told the others of."""
    values = [value[0] for value in rank.given if isinstance(value, tuple)]
    return {name for value in values if isinstance(value, dict) for name in value}


def shard_number(name: str) -> int:
    return int(name.split("-")[1]) - 1


def assert_refused(outcomes: list[Path | Exception], sentence: str, root: Path) -> None:
    """Every rank raises the same, and nothing is left."""
    for outcome in outcomes:
        assert isinstance(outcome, ExportError)
        assert type(outcome) is type(outcomes[0])
        assert str(outcome) == f"cannot export step 5: {sentence}"
    assert names(root) == set()


# --- who writes what ----------------------------------------------------------------------------


def test_shards_are_shared_out(tmp_path: Path, base: Path) -> None:
    ranks = FakeRanks.job(3)
    assert export(ranks, tmp_path, base) == [tmp_path / "step_5"] * 3
    assert_same(stored(tmp_path / "step_5"), dict(untied().state_dict()))
    assert_valid(tmp_path / "step_5", base)
    assert names(tmp_path) == {"step_5"}
    for rank in ranks:
        assert {shard_number(name) % 3 for name in written(rank)} == {rank.rank}


def test_only_near_ranks_write(tmp_path: Path, base: Path) -> None:
    ranks = FakeRanks.job(3, near=(0, 2))
    export(ranks, tmp_path, base)
    assert_valid(tmp_path / "step_5", base)
    assert [bool(written(rank)) for rank in ranks] == [True, False, True]


def test_rank_that_sees_another_root_does_not_write(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def refused(self: Path, *args: Any, **options: Any) -> None:
        if self.name == ".near-1":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        touch(self, *args, **options)

    monkeypatch.setattr(Path, "touch", refused)
    ranks = FakeRanks.job(2)
    export(ranks, tmp_path, base)
    assert [bool(written(rank)) for rank in ranks] == [True, False]
    assert names(tmp_path) == {"step_5"}


def test_first_writes_for_all(tmp_path: Path, base: Path) -> None:
    ranks = FakeRanks.job(2)
    export(ranks, tmp_path, base, writers="first")
    assert_valid(tmp_path / "step_5", base)
    assert [bool(written(rank)) for rank in ranks] == [True, False]


def test_iterator_is_walked_by_all_and_written_by_the_first(tmp_path: Path, base: Path) -> None:
    walked: list[int] = []

    def weights(rank: int) -> Iterator[tuple[str, Any]]:
        yield from untied().state_dict().items()
        walked.append(rank)

    ranks = FakeRanks.job(3)
    assert export(ranks, tmp_path, base, weights) == [tmp_path / "step_5"] * 3
    assert sorted(walked) == [0, 1, 2]
    assert_valid(tmp_path / "step_5", base)
    assert [bool(written(rank)) for rank in ranks] == [True, False, False]


def test_background_writing_of_several_ranks(tmp_path: Path, base: Path) -> None:
    def train(rank: FakeRanks) -> list[Path]:
        exporter = SnapshotExporter(
            tmp_path, base_dir=base, mode="async", ranks=rank, max_shard_bytes=SHARD_BYTES
        )
        model = untied()
        futures = []
        for step in (1, 2, 3):
            with torch.no_grad():
                model.model.norm.weight.fill_(step)
            futures.append(exporter.export(model, step))
        exporter.close()
        return [future.result() for future in futures]

    steps = [tmp_path / f"step_{step}" for step in (1, 2, 3)]
    assert FakeRanks.on_all(FakeRanks.job(2), train) == [steps, steps]
    for number, directory in enumerate(steps, 1):
        assert_valid(directory, base)
        assert set(stored(directory)["model.norm.weight"].tolist()) == {number}


def test_all_ranks_walk_one_order_and_lanes_are_fed_evenly() -> None:
    pieces = [one_to_one(str(number), torch.empty(100 + number % 3)) for number in range(40)]
    files = plan_files(pieces, 1500)
    assert len(files) == 14
    jobs = list(order(files, 4))
    assert [job.lane for job in jobs] == [job.lane for job in order(files, 4)]
    assert sorted(spec.name for job in jobs for spec in job.part.specs) == sorted(
        spec.name for file in files for spec in file.specs
    )
    for lane in range(4):
        mine = [job for job in jobs if job.lane == lane]
        assert [job.part for job in mine] == [p for file in files[lane::4] for p in file.parts]
    halfway = [sum(j.part.size_bytes for j in jobs[:20] if j.lane == lane) for lane in range(4)]
    assert max(halfway) - min(halfway) <= 500
    assert lanes_per_rank(1000) == 1


# --- ranks that fail ----------------------------------------------------------------------------


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Rank of two -> error number of every write of a shard of it."""
    faults: dict[int, int] = {}
    add = ShardWriter.add

    def failing(self: ShardWriter, tensor: Any) -> bool:
        number = faults.get(shard_number(self._path.name) % 2)
        if number is not None:
            raise OSError(number, os.strerror(number), "/a/shard")
        return add(self, tensor)

    monkeypatch.setattr(ShardWriter, "add", failing)
    return faults


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failing", [0, 1])
def test_writer_that_fails_fails_all(
    tmp_path: Path, base: Path, broken_disk: dict[int, int], failing: int, mode: Any
) -> None:
    broken_disk[failing] = errno.EIO
    ranks = FakeRanks.job(2)

    def two_exports(rank: FakeRanks) -> list[Any]:
        exporter = SnapshotExporter(
            tmp_path, base_dir=base, mode=mode, ranks=rank, max_shard_bytes=SHARD_BYTES
        )
        first = exporter.export(untied(), 5).exception()
        left = names(tmp_path)
        rank.exchange("both have looked")
        broken_disk.clear()
        return [first, left, exporter.export(untied(), 6).result()]

    outcomes = FakeRanks.on_all(ranks, two_exports)
    for outcome in outcomes:
        assert isinstance(outcome, list)
        first, left, second = outcome
        assert str(first) == (
            f"cannot export step 5: rank {failing}: /a/shard: {os.strerror(errno.EIO)}"
        )
        assert left == set()
        assert second == tmp_path / "step_6"
    assert_valid(tmp_path / "step_6", base)


def test_full_disk_of_one_rank_is_no_space_on_all(
    tmp_path: Path, base: Path, broken_disk: dict[int, int]
) -> None:
    broken_disk[1] = errno.ENOSPC
    outcomes = export(FakeRanks.job(2), tmp_path, base)
    assert {type(outcome) for outcome in outcomes} == {NoSpace}
    assert "rank 1: the file system is full (at /a/shard)" in str(outcomes[0])
    assert names(tmp_path) == set()


def test_rank_without_its_weights(tmp_path: Path, base: Path) -> None:
    def weights(rank: int) -> Any:
        return untied() if rank != 1 else {"model.norm.weight": 3}

    outcomes = export(FakeRanks.job(3), tmp_path, base, weights)
    assert "rank 1: model.norm.weight is a int, not a tensor" in str(outcomes[2])
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_ranks_with_different_weights(tmp_path: Path) -> None:
    outcomes = export(
        FakeRanks.job(3),
        tmp_path,
        tmp_path / "none",
        lambda rank: {"a": torch.ones(3 if rank == 2 else 4)},
        base_dir=None,
    )
    sentence = (
        "rank 2 has other tensors than rank 0; every rank must export the same model, or parts of "
        "one by its DTensors"
    )
    assert_refused(outcomes, sentence, tmp_path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_at_different_steps_or_of_different_runs_publish_nothing(
    tmp_path: Path, base: Path, mode: Any
) -> None:
    def on_one(rank: FakeRanks) -> str:
        run, step = [("a", 5), ("a", 6), (None, 6)][rank.rank]
        exporter = SnapshotExporter(tmp_path, base_dir=base, run=run, ranks=rank, mode=mode)
        first = exporter.export(untied(), step).exception()
        other = exporter.export(iter(untied().state_dict().items()), 7).exception()
        exporter.close()
        return f"{first}|{other}"

    sentence = "the ranks have come with steps 5, 6 of runs a; every rank must export the same"
    for step, said in zip((5, 6, 6), FakeRanks.on_all(FakeRanks.job(3), on_one), strict=True):
        assert str(said).startswith(f"cannot export step {step}: {sentence}")
        assert str(said).endswith("|None")
    assert names(tmp_path) == {"step_7"}

    def of_two_runs(rank: FakeRanks) -> Path:
        return export_snapshot(
            untied(), tmp_path, step=8, base_dir=base, run=f"r{rank.rank}", ranks=rank
        )

    for outcome in FakeRanks.on_all(FakeRanks.job(2), of_two_runs):
        assert "come with steps 8 of runs r0, r1; every rank must" in str(outcome)
    assert names(tmp_path) == {"step_7"}


def test_wrong_argument_of_one_rank_is_an_error_on_all(tmp_path: Path, base: Path) -> None:
    def on_one(rank: FakeRanks) -> Path:
        exporter = SnapshotExporter(tmp_path, base_dir=base, ranks=rank)
        with pytest.raises(ValueError, match=r"cannot export a str: .* \(on rank 1\)"):
            exporter.export("path" if rank.rank == 1 else untied(), 5)
        with pytest.raises(ValueError, match=r"cannot export step -1: .* \(on rank 0\)"):
            exporter.export(untied(), -1 if rank.rank == 0 else 6)
        return exporter.export(untied(), 7).result()

    started = time.monotonic()
    assert FakeRanks.on_all(FakeRanks.job(2), on_one) == [tmp_path / "step_7"] * 2
    assert time.monotonic() - started < 20


def test_iterator_that_breaks_on_one_rank(tmp_path: Path, base: Path) -> None:
    def weights(rank: int) -> Iterator[tuple[str, Any]]:
        yield from untied().state_dict().items()
        if rank == 1:
            raise RuntimeError("no more")

    outcomes = export(FakeRanks.job(2), tmp_path, base, weights)
    assert_refused(outcomes, "rank 1: RuntimeError: no more", tmp_path)


def test_iterator_is_walked_to_its_end_after_a_failure(tmp_path: Path, base: Path) -> None:
    walked: list[int] = []

    def weights(rank: int) -> Iterator[tuple[str, Any]]:
        yield "model.wrong", torch.ones(1)
        yield from untied().state_dict().items()
        walked.append(rank)

    outcomes = export(FakeRanks.job(2), tmp_path, base, weights)
    assert "rank 0: the weights have 1 tensor" in str(outcomes[1])
    assert sorted(walked) == [0, 1]


def test_hook_that_fails_on_one_rank(tmp_path: Path, base: Path) -> None:
    def on_one(rank: FakeRanks) -> Path:
        def offload() -> None:
            if rank.rank == 1:
                raise RuntimeError("stuck")

        return export_snapshot(
            untied(), tmp_path, step=5, base_dir=base, ranks=rank, offload=offload
        )

    outcomes = FakeRanks.on_all(FakeRanks.job(2), on_one)
    assert_refused(outcomes, "rank 1: RuntimeError: stuck", tmp_path)


def test_base_model_is_only_read_by_the_first(tmp_path: Path, base: Path) -> None:
    def on_one(rank: FakeRanks) -> Path:
        base_dir = base if rank.rank == 0 else Path("/not/on/this/host")
        return export_snapshot(untied(), tmp_path, step=5, base_dir=base_dir, ranks=rank)

    assert FakeRanks.on_all(FakeRanks.job(2), on_one) == [tmp_path / "step_5"] * 2
    assert_valid(tmp_path / "step_5", base)


# --- ranks that are lost ------------------------------------------------------------------------


def leaving_before(rank: FakeRanks, exchange: int) -> FakeRanks:
    """Let a rank die instead of its n-th exchange, counted from 0."""
    ask = rank.exchange

    def dying(value: Any) -> list[Any]:
        if len(rank.given) == exchange:
            rank.leave()
            raise SystemExit
        return ask(value)

    rank.exchange = dying  # type: ignore[method-assign]
    return rank


@pytest.mark.parametrize("exchange", range(6))
def test_lost_rank_is_an_error_on_the_others_and_leaves_nothing(
    tmp_path: Path, base: Path, exchange: int
) -> None:
    ranks = FakeRanks.job(3)
    leaving_before(ranks[2], exchange)

    def on_one(rank: FakeRanks) -> Any:
        try:
            return export_snapshot(
                untied(), tmp_path, step=5, base_dir=base, ranks=rank, max_shard_bytes=SHARD_BYTES
            )
        except SystemExit:
            return None

    started = time.monotonic()
    outcomes = FakeRanks.on_all(ranks, on_one)
    assert time.monotonic() - started < 20
    for outcome in outcomes[:2]:
        assert isinstance(outcome, PeerLost)
        assert str(outcome).startswith("cannot export step 5: ")
        assert outcome.reason == "export_failed"
    assert names(tmp_path) == set()


def test_what_is_published_stays_published_when_a_rank_dies_after_it(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = FakeRanks.job(2)
    leaving_before(ranks[1], 6)

    def on_one(rank: FakeRanks) -> Any:
        try:
            return export_snapshot(untied(), tmp_path, step=5, base_dir=base, ranks=rank)
        except SystemExit:
            return None

    assert FakeRanks.on_all(ranks, on_one)[0] == tmp_path / "step_5"
    assert "peer_lost_after_export" in capsys.readouterr().out
    assert_valid(tmp_path / "step_5", base)
