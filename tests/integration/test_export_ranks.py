"""Snapshots of jobs of several processes: torchrun, FSDP2, DDP; and ranks that fail or die."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from export_rig import TwoRanks, run_lost_ranks

#: seconds; what ranks that are lost cost the others is far below their timeout of 60.
SOON_S = 20.0


# -- ranks that work together


def test_parts_of_every_shape_and_dtype_are_gathered(two_ranks: TwoRanks) -> None:
    assert two_ranks.both("gather") == [[], []]


def test_rank_that_sees_another_directory_is_not_near(two_ranks: TwoRanks) -> None:
    for report in two_ranks.both("near"):
        assert report == {"host": [0, 1], "directory": [0]}


def test_fsdp2_ranks_write_their_shards_side_by_side(two_ranks: TwoRanks) -> None:
    reports = two_ranks.both("fsdp")
    directory = two_ranks.root / "step_1"
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    shards = {path.name for path in directory.glob("*.safetensors")}
    first, second = (set(report["wrote"]) for report in reports)
    assert first
    assert second
    assert not first & second
    assert first | second == shards == set(index["weight_map"].values())
    for report in reports:
        assert report["differences"] == []
        assert report["held"] == 1  # gathered tensors at a time
        assert report["logits"] < 1e-5
    manifest = json.loads((directory / ".complete").read_bytes())
    assert shards <= manifest["files"].keys()


def test_one_rank_writes_for_all_in_another_dtype(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.both("first")
    assert first["wrote"]
    assert second["wrote"] == []
    assert first["differences"] == second["differences"] == []


def test_training_goes_on_while_both_ranks_write(two_ranks: TwoRanks) -> None:
    for report in two_ranks.both("async"):
        assert report["differences"] == [[], []]
        assert report["held"] == 1
    for step in (11, 12):
        assert (two_ranks.root / f"step_{step}" / ".complete").exists()


def test_ddp_model_is_exported_once(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.both("ddp")
    assert first["wrote"]
    assert second["wrote"] == []
    assert first["differences"] == second["differences"] == []


def test_adapter_of_sharded_model_is_merged_and_kept(two_ranks: TwoRanks) -> None:
    for report in two_ranks.both("lora"):
        assert report == {"adapter": 0.0, "trained": True, "differences": []}


# -- ranks that fail


def test_error_of_one_writer_is_every_rank_s_error(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.both("failing_writer")
    assert first["error"][:3] == second["error"][:3]
    assert first["left"] == second["left"] == []
    assert first["differences"] == second["differences"] == []  # the next export is fine


def test_full_file_system_is_no_space_on_every_rank(two_ranks: TwoRanks) -> None:
    if not two_ranks.has_small:
        pytest.skip("needs a small file system: mounting a tmpfs is not permitted")
    first, second = two_ranks.both("full")
    for one, other in zip(first, second, strict=True):
        assert one["error"][:3] == other["error"][:3]
        assert one["error"][:2] == ["NoSpace", "no_space"]
        assert one["left"] == other["left"] == []
    assert "the weights take" in first[0]["error"][2]  # nothing was written
    assert "the file system is full" in first[1]["error"][2]


# -- ranks that are lost


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("lost-ranks")
    run_lost_ranks(work)
    return work


def survivors(work: Path, name: str, victim: int, size: int = 2) -> list[dict[str, Any]]:
    """Reports of all ranks but the lost one; none of them hung."""
    ends = json.loads((work / "ends.json").read_bytes())
    others = [rank for rank in range(size) if rank != victim]
    assert [ends[f"{name}-{rank}"] for rank in others] == [0] * len(others)
    return [json.loads((work / name / f"rank-{rank}.json").read_bytes()) for rank in others]


@pytest.mark.parametrize("moment", ["gather", "write", "background"])
def test_killed_rank_is_an_error_on_the_other_and_no_snapshot(lost: Path, moment: str) -> None:
    [report] = survivors(lost, moment, victim=1)
    assert json.loads((lost / "ends.json").read_bytes())[f"{moment}-1"] == -signal.SIGKILL
    assert report["first"]["error"] == "PeerLost"
    assert report["first"]["reason"] == "export_failed"
    assert report["first"]["seconds"] < SOON_S
    assert report["again"]["error"] == "PeerLost"  # at once: training loses no more time
    assert report["again"]["seconds"] < 1.0
    assert list((lost / moment / "root").iterdir()) == []


def test_killed_publisher_leaves_nothing_that_evald_would_read(lost: Path) -> None:
    [report] = survivors(lost, "publisher", victim=0)
    assert report["first"]["error"] == "PeerLost"
    assert report["first"]["seconds"] < SOON_S
    left = list((lost / "publisher" / "root").iterdir())
    assert all(path.name.startswith(".tmp-") for path in left)
    assert not list((lost / "publisher" / "root").rglob(".complete"))


def test_frozen_rank_is_given_up_at_the_deadline(lost: Path) -> None:
    [report] = survivors(lost, "frozen", victim=1)
    assert report["first"]["error"] == "PeerLost"
    assert 3.0 < report["first"]["seconds"] < 2 * SOON_S
    assert list((lost / "frozen" / "root").iterdir()) == []


def test_ranks_without_a_connection_to_the_dead_one_hear_of_it(lost: Path) -> None:
    for report in survivors(lost, "ring", victim=2, size=4):
        assert report["first"]["error"] == "PeerLost"
        assert report["first"]["seconds"] < SOON_S
        assert "(in an earlier exchange)" in report["again"]["text"]
