"""Three real engines (CPU mode), one killed and one frozen in mid-point: the point ends ok."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from rig import Rig, rig, until

from evald.engines.guard import descendants
from evald.results.samples import SampleRecord
from evald.testing import write_base_model, write_snapshot

QUESTIONS = 500
#: a frozen engine is found by its probes: short ones, or the test waits for nothing else.
FLEET = """engines = 3
probe_interval_s = 2
probe_timeout_s = 5
probe_failures = 2
"""


def samples(r: Rig, step: int) -> list[SampleRecord]:
    """All lines of the point's sample journals."""
    directory = r.work / "results" / "samples" / "t" / f"step_{step}.r0"
    lines = []
    for path in directory.glob("*.jsonl"):
        # the last line may be in the making
        whole = path.read_bytes().rpartition(b"\n")[0]
        lines += [msgspec.json.decode(line, type=SampleRecord) for line in whole.splitlines()]
    return lines


def pids(r: Rig) -> list[int | None]:
    return [engine["pid"] for engine in r.status()["engines"]]


def states(r: Rig) -> list[str]:
    return [engine["state"] for engine in r.status().get("engines", [])]


def scheduler_of(launcher: int) -> int:
    [scheduler] = [
        pid
        for pid in descendants(launcher)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sglang::scheduler")
    ]
    return scheduler


@pytest.mark.timeout(300)
def test_one_killed_and_one_frozen_in_mid_point(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base", answer=1)
    with rig(tmp_path, model=base, questions=QUESTIONS, fleet=FLEET) as r:
        r.start()
        until(lambda: states(r) == ["ready"] * 3, "three engines are ready", 200)
        write_snapshot(r.root / "step_1", seed=1, answer=1)
        until(lambda: len({sample.engine for sample in samples(r, 1)}) == 3, "all three answer", 60)
        killed, frozen, _ = before = pids(r)
        assert killed
        assert frozen
        r.note_processes()
        os.kill(scheduler_of(killed), signal.SIGKILL)
        os.killpg(frozen, signal.SIGSTOP)
        began, done = time.monotonic(), len(samples(r, 1))
        assert done < 2 * QUESTIONS

        point = r.point(1, timeout_s=90)
        print(f"{done} samples before the faults; ended {time.monotonic() - began:.1f} s after")
        assert str(point.outcome) == "ok", point.detail
        assert point.counts.n_total == point.counts.n_scored == 2 * QUESTIONS
        assert point.engines == ["engine-0", "engine-1", "engine-2"]
        scored = samples(r, 1)
        assert {sample.status for sample in scored} == {"scored"}
        assert {sample.digest for sample in scored} == {point.digest}
        assert all(f":{str(point.digest)[:8]}:" in s.weight_version for s in scored)
        asked = [f"{name}{number}" for name in "ab" for number in range(QUESTIONS)]
        assert len(scored) == len(asked)
        assert len({(sample.config, sample.question) for sample in scored}) == len(asked)
        # the third one was never touched; the frozen one is gone or being replaced
        assert pids(r)[2] == before[2]
        until(lambda: not Path(f"/proc/{frozen}").exists(), "the frozen one is killed", 30)

        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)
