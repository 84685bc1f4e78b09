"""The whole daemon on real SGLang (CPU mode): bad snapshots, kill -9, a snapshot that kills it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bad_snapshots import BAD
from rig import Rig, rig, until

from evald.engines.guard import descendants
from evald.results.records import Accepted
from evald.testing import write_base_model, write_snapshot

#: starts and restarts of real engines take half a minute each on two cores.
START_S = 180.0


def drop(r: Rig, step: int, seed: int) -> None:
    """A good snapshot of the untrained model: its answers are noise, but they are its own."""
    write_snapshot(r.root / f"step_{step}", seed=seed, answer=1)


@pytest.mark.timeout(600)
def test_good_and_bad_snapshots_and_kill_9(tmp_path: Path) -> None:
    with rig(tmp_path, model=write_base_model(tmp_path / "base", answer=1), questions=400) as r:
        daemon = r.start()
        drop(r, 1, seed=1)
        first = r.point(1, timeout_s=START_S)
        assert str(first.outcome) == "ok", first.detail
        assert first.provenance["sglang"] == "0.5.23"
        pid = r.status()["engines"][0]["pid"]
        for number, (name, bad) in enumerate(BAD.items()):
            if bad.reason != "invalid_snapshot":
                continue
            directory = r.root / f"step_{10 + number}"
            bad.build(directory)
            (directory / ".complete").touch()
            point = r.point(10 + number)
            assert point.reason == "invalid_snapshot", name
            assert bad.words in point.detail
        drop(r, 30, seed=30)
        assert str(r.point(30, timeout_s=60).outcome) == "ok"
        assert r.status()["engines"][0]["pid"] == pid

        journal = r.work / "results" / "samples" / "t" / "step_31.r0" / "a.jsonl"
        drop(r, 31, seed=31)
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 5, "samples")
        assert len(descendants(daemon.pid)) >= 4  # guard, launcher, scheduler, detokenizer
        killed = time.monotonic()
        r.kill()
        until(lambda: not r.processes(), "no process is left", 10)
        print(f"nothing left {time.monotonic() - killed:.1f} s after kill -9")
        assert 31 not in [point.step for point in r.points()]
        r.start()
        point = r.point(31, timeout_s=START_S)
        assert str(point.outcome) == "ok", point.detail
        assert point.counts.n_scored == point.counts.n_total == 800
        assert point.counts.n_resumed > 0
        accepted = [x.step for x in r.records() if isinstance(x, Accepted)]
        assert accepted.count(31) == 1
        until(lambda: len(list(r.root.glob("step_*"))) <= 2, "no more than keep is left")


@pytest.mark.timeout(600)
def test_a_snapshot_that_kills_sglang_and_one_of_nan(tmp_path: Path) -> None:
    """Validation switched off: the daemon lives, blames the snapshot, recovers."""
    base = write_base_model(tmp_path / "base", answer=1)
    with rig(tmp_path, model=base, staging='validation = "off"', questions=5) as r:
        r.start()
        drop(r, 1, seed=1)
        assert str(r.point(1, timeout_s=START_S).outcome) == "ok"
        for step, name in ((2, "truncated shard"), (3, "NaN")):
            BAD[name].build(r.root / f"step_{step}")
            (r.root / f"step_{step}" / ".complete").touch()
            point = r.point(step, timeout_s=2 * START_S)
            assert (str(point.outcome), point.reason) == ("skipped", "pin_violation")
            print(f"{name}: {point.detail}")
        drop(r, 4, seed=4)
        assert str(r.point(4, timeout_s=START_S).outcome) == "ok"
        assert r.status()["engines"][0]["restarts"] == 0
