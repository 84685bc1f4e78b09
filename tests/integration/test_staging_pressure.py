"""A real daemon whose staging root is short of room, and the best snapshot that stays."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from rig import Rig, rig, until

from evald.results.records import Alert
from evald.testing import write_fake_python, write_snapshot


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_python(tmp_path_factory.mktemp("quick") / "python")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_python(tmp_path_factory.mktemp("slow") / "python", delay_s=0.3)


def drop(r: Rig, name: str, *, answer: int = 7, padding: int = 0) -> None:
    step = int(name.rpartition("_")[2])
    directory = write_snapshot(r.root / name, seed=step, answer=answer, marker=None)
    with (directory / "padding").open("wb") as file:
        file.truncate(padding)
    (directory / ".complete").touch()


def starts(r: Rig) -> list[tuple[str, int]]:
    """Run and step in the order of their measurement."""
    return [(point.run, point.step) for point in r.points() if not point.reason]


def test_what_is_over_the_budget_goes_at_once_and_makes_room(tmp_path: Path, quick: Path) -> None:
    """The ring does not hold what was refused, and keeps what was measured."""
    with rig(tmp_path, python=quick, staging="max_bytes = 5_000_000\nkeep = 1") as r:
        r.start()
        drop(r, "step_1", padding=2_000_000)
        r.point(1)
        drop(r, "step_2", padding=4_000_000)
        assert r.point(2).reason == "no_space"
        until(lambda: not (r.root / "step_2").exists(), "the refused one is deleted")
        drop(r, "step_3", padding=2_000_000)
        assert r.point(3).reason == ""
        until(lambda: not (r.root / "step_1").exists(), "the ring holds one")
        assert {path.name for path in r.root.glob("step_*")} == {"step_3"}


def test_a_full_file_system_is_no_space(tmp_path: Path, quick: Path) -> None:
    with rig(tmp_path, python=quick, staging=f"min_free_bytes = {1 << 60}") as r:
        r.start()
        drop(r, "step_1")
        ended = r.point(1)
        assert ended.reason == "no_space"
        assert "under staging.min_free_bytes" in ended.detail
        assert r.status()["staging"]["min_free_bytes"] == 1 << 60


def test_what_changes_behind_its_marker_is_the_next_revision(tmp_path: Path, slow: Path) -> None:
    """Found by chaos: it was neither retired nor looked at again, and filled the root."""
    with rig(tmp_path, python=slow, staging="keep = 0") as r:
        r.start()
        drop(r, "step_1")
        until(lambda: [p["state"] for p in r.status()["running"]] == ["evaluating"], "it runs")
        other = write_snapshot(tmp_path / "other", seed=1, answer=3)
        shutil.copy(other / "model.safetensors", r.root / "step_1")
        first, second = r.point(1), r.point(1, revision=1)
        assert (first.reason, second.reason) == ("", "")
        assert first.digest != second.digest
        until(lambda: not (r.root / "step_1").exists(), "it is retired like any other")


def test_latest_measures_the_newest_and_names_the_others(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=2.0)
    dispatch = 'overflow = "latest"\nmax_in_flight = 1'
    with rig(tmp_path, python=slow, dispatch=dispatch, staging="keep = 0") as r:
        r.start()
        drop(r, "step_1")
        until(lambda: r.status()["running"], "the first one runs")
        for step in range(2, 6):
            drop(r, f"step_{step}")
        reasons = [r.point(step).reason for step in range(1, 6)]
        assert reasons == ["", "superseded", "superseded", "superseded", ""]
        assert "dispatch.overflow is 'latest'" in r.point(3).detail
        until(lambda: not list(r.root.glob("step_*")), "all of them are deleted")


def test_runs_take_turns(tmp_path: Path, slow: Path) -> None:
    with rig(tmp_path, python=slow, dispatch="max_in_flight = 1") as r:
        for name in ("one/step_1", "one/step_2", "one/step_3", "two/step_1", "two/step_2"):
            drop(r, name)
        r.start()
        until(lambda: len(r.points()) == 5, "all of them end")
        assert starts(r) == [("one", 1), ("two", 1), ("one", 2), ("two", 2), ("one", 3)]


def test_another_results_directory_measures_nothing_again(tmp_path: Path, quick: Path) -> None:
    with rig(tmp_path, python=quick) as r:
        r.start()
        drop(r, "step_1")
        r.point(1)
        until((r.root / ".evald" / "ended.json").exists, "the root remembers it")
        assert r.stop() == 0
        r.config.write_text(r.config.read_text().replace("/results", "/results2"))
        r.results = tmp_path / "results2" / "results.jsonl"
        r.start()
        drop(r, "step_2")
        r.point(2)
        assert [point.step for point in r.points()] == [2]


def best_table(tmp_path: Path) -> str:
    return f'[keep_best]\nmetric = "eval/a"\ndir = "{tmp_path}/best"'


def test_the_best_one_stays_also_when_the_daemon_is_killed_over_it(
    tmp_path: Path, quick: Path
) -> None:
    size = 64 << 20  # a hole: it takes room only where it is copied to
    with rig(tmp_path, python=quick, staging="keep = 0", tables=best_table(tmp_path)) as r:
        daemon = r.start()
        drop(r, "step_1", answer=3, padding=size)
        place = tmp_path / "best" / "t"
        until(lambda: list(place.glob(".tmp-*/*")), "the copy is under way")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(10)
        assert list(place.glob(".tmp-*"))
        assert (r.root / "step_1").exists()
        r.start()
        until((place / "best").exists, "it is copied by the next life")
        until(lambda: not (r.root / "step_1").exists(), "and only then deleted")
        for step, answer in ((2, 7), (3, 3)):
            drop(r, f"step_{step}", answer=answer)
            r.point(step)
        until(lambda: not list(r.root.glob("step_*")), "all of them are deleted")
        assert (place / "best").readlink() == Path("step_2.r0")
        assert {path.name for path in place.iterdir()} == {"best", "best_by.txt", "step_2.r0"}
        assert not [record for record in r.records() if isinstance(record, Alert)]


def test_a_best_one_that_finds_no_place_stays_until_it_does(tmp_path: Path, quick: Path) -> None:
    with rig(tmp_path, python=quick, staging="keep = 0", tables=best_table(tmp_path)) as r:
        daemon = r.start()
        place = tmp_path / "best" / "t"
        place.parent.mkdir()
        place.write_text("a file in its place")
        drop(r, "step_1", answer=7)
        assert r.point(1).reason == ""

        def alerts() -> list[str]:
            return [record.detail for record in r.records() if isinstance(record, Alert)]

        until(alerts, "the alert")
        assert "cannot keep" in alerts()[0]
        drop(r, "step_2", answer=3)
        assert r.point(2).reason == ""
        until(lambda: not (r.root / "step_2").exists(), "the worse one is deleted")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(10)
        r.start()
        drop(r, "step_3", answer=3)
        assert r.point(3).reason == ""
        until(lambda: not (r.root / "step_3").exists(), "another worse one is deleted")
        assert (r.root / "step_1").exists()
        place.unlink()
        until(lambda: not (r.root / "step_1").exists(), "it is copied, and only then deleted")
        assert (place / "best").readlink() == Path("step_1.r0")
