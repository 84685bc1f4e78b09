"""Bad snapshots through the real daemon: one clear sentence each, and the next good one works."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_snapshots import BAD, Bad
from rig import Rig, rig, until

from evald.results.records import Alert, PointRecord
from evald.testing import write_base_model, write_snapshot
from evald.testing.fake_launcher import write_fake_python

NOBODY = 65534


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    work = tmp_path_factory.mktemp("bad")
    with rig(work, python=write_fake_python(work / "fake-python")) as made:
        made.start()
        yield made


def engine_pid(r: Rig) -> int:
    pid: int = r.status()["engines"][0]["pid"]
    return pid


def next_good_one(r: Rig, step: int) -> PointRecord:
    """Drop a good snapshot and see it measured."""
    write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
    point = r.point(step)
    assert str(point.outcome) == "ok"
    assert point.metrics["eval/a"] == 1.0
    return point


@pytest.mark.parametrize(("number", "name"), list(enumerate(BAD)))
def test_bad_snapshot(daemon: Rig, number: int, name: str) -> None:
    bad: Bad = BAD[name]
    step = 100 + 2 * number
    # also: the engine is up, or this would not be measured
    next_good_one(daemon, step)
    before = engine_pid(daemon)
    directory = daemon.root / f"step_{step + 1}"
    bad.build(directory)
    (directory / ".complete").touch()
    point = daemon.point(step + 1)
    assert (str(point.outcome), point.reason) == ("skipped", bad.reason), point.detail
    assert bad.words in point.detail
    assert "\n" not in point.detail
    assert point.metrics == {"eval/step": step + 1, f"eval/skipped_{bad.reason}": 1}
    if bad.reason == "invalid_snapshot":
        assert engine_pid(daemon) == before
    next_good_one(daemon, step + 1000)


def test_snapshot_that_vanishes_while_queued(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "slow-python", delay_s=0.5)
    with rig(tmp_path, python=python, questions=200, dispatch="max_in_flight = 1") as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        until(lambda: [p["step"] for p in r.status().get("queued", [])] == [2], "queues")
        shutil.rmtree(r.root / "step_2")
        point = r.point(2)
        assert point.reason == "ckpt_missing"
        assert "vanished" in point.detail
        assert str(r.point(1).outcome) == "ok"
        next_good_one(r, 3)


def test_same_step_again(daemon: Rig) -> None:
    """Equal bytes are answered already; other bytes are the next revision."""
    first = next_good_one(daemon, 500)
    shutil.rmtree(daemon.root / "step_500")
    write_snapshot(daemon.root / "step_500", seed=500, answer=7)
    next_good_one(daemon, 501)
    assert [p.revision for p in daemon.points() if p.step == 500] == [0]
    shutil.rmtree(daemon.root / "step_500")
    write_snapshot(daemon.root / "step_500", seed=500, answer=3)
    second = daemon.point(500, revision=1)
    assert second.metrics["eval/a"] == 0.0
    assert second.digest != first.digest


def test_files_of_another_user(tmp_path: Path) -> None:
    """The trainer is another user, and the daemon may not override file modes.

    Only root can write another user's files; elsewhere the same modes are set on our own.
    """
    root = os.getuid() == 0
    ordinary = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]
    before = ordinary if root else []
    with rig(tmp_path, python=write_fake_python(tmp_path / "fake-python")) as r:
        r.start(before=before)
        unreadable = write_snapshot(r.root / "step_1", seed=1, answer=7, marker=None)
        (unreadable / "model.safetensors").chmod(0o600 if root else 0)
        (unreadable / ".complete").touch()
        give_away(unreadable)
        point = r.point(1)
        assert (str(point.outcome), point.reason) == ("skipped", "invalid_snapshot")
        for words in ("model.safetensors", "0600" if root else "0000", "0644"):
            assert words in point.detail
        # readable, but evald may not delete in it: measured, and said in words
        foreign = write_snapshot(r.root / "step_2", seed=2, answer=7, marker=None)
        (foreign / ".complete").touch()
        give_away(foreign)
        assert str(r.point(2).outcome) == "ok"
        alerts = until(lambda: [x for x in r.records() if isinstance(x, Alert)], "an alert")
        assert "cannot delete" in alerts[0].detail
        assert foreign.exists()
        checked = r.evald("check", str(r.config), before=before)
        assert checked.returncode == 0, checked.stderr
        assert "cannot delete" in checked.stdout
        for directory in (unreadable, foreign):
            directory.chmod(0o755)


def give_away(directory: Path) -> None:
    """Make a directory and its files those of another user, or one that nobody may write to."""
    if os.getuid() == 0:
        for path in (directory, *directory.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    directory.chmod(0o555 if os.getuid() else 0o755)


def test_a_snapshot_that_kills_the_engine_is_blamed(tmp_path: Path) -> None:
    """Validation switched off: the daemon lives, blames the snapshot, recovers."""
    base = write_base_model(tmp_path / "base")
    python = write_fake_python(tmp_path / "fake-python")
    with rig(tmp_path, python=python, model=base, staging='validation = "off"') as r:
        r.start()
        next_good_one(r, 1)
        BAD["truncated shard"].build(r.root / "step_2")
        (r.root / "step_2" / ".complete").touch()
        point = r.point(2)
        assert (str(point.outcome), point.reason) == ("skipped", "pin_violation")
        assert "2 attempts failed" in point.detail
        assert r.status()["engines"][0]["restarts"] == 0
        next_good_one(r, 3)


def test_a_finished_snapshot_under_another_name_is_told(daemon: Rig) -> None:
    write_snapshot(daemon.root / "Step_77", seed=1)

    def told() -> list[str]:
        alerts = [x for x in daemon.records() if isinstance(x, Alert)]
        return [x.detail for x in alerts if x.name == "snapshot_misnamed"]

    (sentence,) = until(told, "an alert")
    assert "Step_77" in sentence
    assert "staging.pattern = 'step_{step}'" in sentence
