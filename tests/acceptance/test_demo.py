"""``evald demo``: the main job on real input, as a newcomer sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from plain_environ import plain_environ

from evald.engines.guard import all_pids
from evald.results.follow import read_records
from evald.results.records import PointRecord, RunEnd


@pytest.mark.timeout(600)
def test_the_curve_climbs_and_nothing_is_left(tmp_path: Path) -> None:
    root = Path(f"/dev/shm/evald-demo-test-{os.getpid()}")
    done = subprocess.run(
        [sys.executable, "-m", "evald", "demo", "--steps", "600", "--min-mean", "0.6"],
        env=plain_environ()
        | {"EVALD_DEMO_DIR": str(tmp_path / "demo"), "EVALD_DEMO_ROOT": str(root)},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ledger = tmp_path / "demo" / "results" / "results.jsonl"
    assert str(ledger) in done.stdout
    records = read_records(ledger)
    points = [record for record in records if isinstance(record, PointRecord)]
    assert [point.step for point in points] == [150, 300, 450, 600]
    assert {str(point.outcome) for point in points} == {"ok"}
    names = ("copy", "reverse", "sort", "max", "add")
    means = [sum(point.metrics[f"eval/{name}"] for name in names) / 5 for point in points]
    assert means[0] < 0.4
    assert means[-1] > 0.6
    assert isinstance(records[-1], RunEnd)
    assert not root.exists()
    assert not list((tmp_path / "demo").rglob("*.safetensors"))
    sample = tmp_path / "demo" / "results" / "samples" / "demo" / "step_600.r0" / "add.jsonl"
    first = json.loads(sample.read_text().splitlines()[0])
    assert first["weight_version"].startswith("demo:600:")
    # engines rename their processes, but what they write to is below the demo's directory
    for pid in all_pids():
        for number in (0, 1, 2):
            with suppress(OSError):
                target = Path(f"/proc/{pid}/fd/{number}").readlink()
                assert not target.is_relative_to(tmp_path), pid
