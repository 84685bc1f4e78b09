"""What a full disk, a machine's restart and a trainer's restart leave in the ledger."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, rig, until

from evald.results.records import Accepted, AnyRecord
from evald.results.segments import closed_segments
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

_DISK_BYTES = 2 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give the rig's results directory a file system of 2 MiB."""
    results = tmp_path / "results"
    results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=0755", "tmpfs", str(results)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("did not run: only root may mount a small tmpfs")
    try:
        yield results
    finally:
        subprocess.run(["umount", "--lazy", str(results)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def contiguous(records: list[AnyRecord]) -> bool:
    return [record.seq for record in records] == list(range(1, len(records) + 1))


@pytest.mark.parametrize("log", ["/dev/full", ">(exit)"])
def test_a_log_that_cannot_be_written_is_lost_and_nothing_else(tmp_path: Path, log: str) -> None:
    """A disk that is full, a pipe whose reader has died."""
    with rig(tmp_path, python=write_fake_python(tmp_path / "python")) as r:
        r.start(before=["bash", "-c", f'exec "$@" 2> {log}', "bash"])
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert str(r.point(1).outcome) == "ok"
        r.stop()


def test_a_full_results_disk_pauses_evaluation_until_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    python = write_fake_python(tmp_path / "python", delay_s=0.05)
    with rig(tmp_path, python=python, questions=60, results="rotate_mb = 0.005") as r:
        daemon = r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert str(r.point(1).outcome) == "ok"
        filler = fill(small_disk)
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        write_snapshot(r.root / "step_3", seed=3, answer=7)
        said = until(lambda: r.status().get("not_written"), "the status says it")
        assert "No space left on device; make room" in said
        assert str(small_disk) in said
        assert r.state() == "paused"
        shown = r.evald("status", str(r.config)).stdout
        assert "PAUSED: cannot write" in shown
        until(lambda: "results_not_written" in r.log(), "it is logged")
        assert [point.step for point in r.points()] == [1]
        assert r.results.read_bytes().endswith(b"\n") or not r.results.read_bytes()
        filler.unlink()
        assert str(r.point(3).outcome) == str(r.point(2).outcome) == "ok"
        until(lambda: r.state() == "serving", "it serves again")
        assert r.status()["not_written"] == ""
        assert daemon.poll() is None
        for point in r.points():
            assert point.counts.n_total == point.counts.n_scored == 120
        assert contiguous(r.records())
        assert closed_segments(r.results)
        tail = r.evald("tail", str(r.results), "--once").stdout
        assert len(tail.splitlines()) == len(r.records())
        assert r.stop() == 0


def test_an_engine_that_dies_while_the_disk_is_full_is_not_held_to_blame(
    tmp_path: Path, small_disk: Path
) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), questions=2) as r:
        r.start()

        def engine() -> dict[str, Any]:
            found: dict[str, Any] = r.status()["engines"][0]
            return found

        until(lambda: engine()["state"] == "ready", "the engine is ready")
        filler = fill(small_disk)
        os.kill(engine()["pid"], signal.SIGKILL)
        until(lambda: engine()["state"] == "backoff", "it waits")
        assert f"cannot write into {small_disk}/engines/engine-0: No space" in engine()["detail"]
        filler.unlink()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert str(r.point(1).outcome) == "ok"
        assert engine()["restarts"] == 0


def test_a_stop_while_the_disk_is_full_resumes_later(tmp_path: Path, small_disk: Path) -> None:
    python = write_fake_python(tmp_path / "python", delay_s=0.5)
    with rig(tmp_path, python=python, questions=40, dispatch="drain_timeout_s = 1") as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        filler = fill(small_disk)
        until(lambda: r.status().get("not_written"), "the status says it")
        assert r.stop() == 0
        assert r.points() == []
        filler.unlink()
        r.start()
        point = r.point(1)
        assert str(point.outcome) == "ok"
        assert point.counts.n_scored == 80
        assert contiguous(r.records())


def _waiting(work: Path) -> Rig:
    """Give a daemon that was killed while its points queued: it has no engine that answers."""
    r = Rig(work, python=write_fake_python(work / "python", delay_s=30), questions=2)
    r.start()
    for step in (1, 2):
        write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
    until(lambda: sum(isinstance(one, Accepted) for one in r.records()) == 2, "both are accepted")
    r.kill()
    return r


def test_a_machine_that_restarts_loses_what_lay_in_memory_and_says_so(tmp_path: Path) -> None:
    r = _waiting(tmp_path)
    try:
        for entry in r.root.iterdir():  # a tmpfs is empty after a reboot
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        r.start()
        for step in (1, 2):
            point = r.point(step)
            assert (str(point.outcome), point.reason) == ("skipped", "ckpt_missing")
            assert "vanished while evald was down (tmpfs is empty after a reboot)" in point.detail
            assert point.metrics["eval/skipped_ckpt_missing"] == 1
        assert contiguous(r.records())
        assert r.stop() == 0
    finally:
        r.close()


def test_a_trainer_that_restarts_and_overlaps_is_answered_or_measured_anew(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python")
    with rig(tmp_path, python=python, questions=3, staging="keep = 0") as r:
        r.start()
        for step in (1, 2, 3):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
        r.evald("wait", str(r.results), "--points", "3", "--ok", "--timeout", "40")
        until(lambda: not list(r.root.glob("step_*")), "all are retired")
        # it goes on from step 1: step 2 comes out the same, step 3 does not, step 4 is new
        for step, seed in ((2, 2), (3, 33), (4, 4)):
            write_snapshot(r.root / f"step_{step}", seed=seed, answer=7)
        assert r.point(3, revision=1).digest != r.point(3).digest
        assert str(r.point(4).outcome) == "ok"
        until(lambda: not list(r.root.glob("step_*")), "what was answered is retired, too")
        assert sorted((one.step, one.revision) for one in r.points()) == [
            (1, 0), (2, 0), (3, 0), (3, 1), (4, 0),
        ]  # fmt: skip
        assert contiguous(r.records())
        assert r.stop() == 0
