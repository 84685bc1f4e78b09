"""The whole daemon on real SGLang (CPU mode): bad snapshots, kill -9, a snapshot that kills it."""

from __future__ import annotations

import re
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


def tells_its_load(r: Rig) -> bool:
    """Whether people see what the engine does at the moment."""
    engines = r.status().get("engines", [])
    return bool(engines and engines[0]["kv_use"] and engines[0]["tokens_per_s"])


def refuses_what_can_be_seen(r: Rig) -> None:
    """No engine loads what is bad at a glance."""
    for number, (name, bad) in enumerate(BAD.items()):
        if bad.reason != "invalid_snapshot":
            continue
        directory = r.root / f"step_{10 + number}"
        bad.build(directory)
        (directory / ".complete").touch()
        point = r.point(10 + number)
        assert point.reason == "invalid_snapshot", name
        assert bad.words in point.detail


def blamed(r: Rig, step: int, name: str) -> str:
    """Have a snapshot that only SGLang can find bad: what its record says."""
    BAD[name].build(r.root / f"step_{step}")
    (r.root / f"step_{step}" / ".complete").touch()
    point = r.point(step, timeout_s=2 * START_S)
    assert (str(point.outcome), point.reason) == ("skipped", "pin_violation"), name
    return point.detail


@pytest.mark.timeout(600)
def test_good_bad_and_deadly_snapshots_and_kill_9(tmp_path: Path) -> None:
    with rig(tmp_path, model=write_base_model(tmp_path / "base", answer=1), questions=300) as r:
        daemon = r.start()
        drop(r, 1, seed=1)
        first = r.point(1, timeout_s=START_S)
        assert str(first.outcome) == "ok", first.detail
        assert first.provenance["sglang"] == "0.5.23"
        pid = r.status()["engines"][0]["pid"]
        refuses_what_can_be_seen(r)
        drop(r, 30, seed=30)
        until(lambda: tells_its_load(r), "the engine's load is seen", 60)
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

        # the next life looks at no snapshot before SGLang does
        text = r.config.read_text()
        r.config.write_text(text.replace("[staging]\n", '[staging]\nvalidation = "off"\n'))
        r.start()
        point = r.point(31, timeout_s=START_S)
        assert str(point.outcome) == "ok", point.detail
        assert point.counts.n_scored == point.counts.n_total == 600
        assert point.counts.n_resumed > 0
        accepted = [x.step for x in r.records() if isinstance(x, Accepted)]
        assert accepted.count(31) == 1
        until(lambda: len(list(r.root.glob("step_*"))) <= 2, "no more than keep is left")

        # SGLang dies of this one; each attempt is made on a server that has never seen it
        words = "2 attempts failed .*base model loads.*stage load: .*the server died"
        assert re.search(words, blamed(r, 40, "truncated shard"))
        pid = r.status()["engines"][0]["pid"]
        # it answers the load of this one with 200 and takes the label: only the canary sees it
        assert re.search("stage canary: .*not finite", blamed(r, 41, "NaN"))
        assert r.status()["engines"][0]["pid"] != pid
        drop(r, 42, seed=42)
        assert str(r.point(42, timeout_s=START_S).outcome) == "ok"
        assert r.status()["engines"][0]["restarts"] == 0
        logs = list((r.work / "results" / "engines" / "engine-0").glob("*.log"))
        assert len(logs) == 6  # one file for each start: two lives, and each attempt's server
