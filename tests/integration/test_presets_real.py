"""A daemon on the output directory of a training job that knows nothing of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from plain_environ import plain_environ
from preset_trees import save
from rig import rig, until

from evald.results.records import Accepted
from evald.testing.fake_launcher import write_fake_python

#: imports torch: only a process of its own does.
JOB = Path(__file__).with_name("hf_trainer_job.py")
PRESET = 'preset = "hf-trainer"'


def test_each_checkpoint_of_a_real_trainer_is_measured_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    python = write_fake_python(tmp_path / "python")
    with rig(tmp_path, python=python, model=tiny_model, staging=PRESET) as r:
        r.start()
        job = subprocess.run(
            [sys.executable, str(JOB), str(tiny_model), str(r.root), str(r.results)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=plain_environ(),
        )
        assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-2000:] + r.log()[-3000:]
        steps = list(range(2, 13, 2))
        r.point(steps[-1])
        # once more at the daemon's next start: all of it is answered
        assert r.stop() == 0
        r.start()
        until(lambda: r.status().get("state") == "serving", "the next life serves")
        points = sorted(r.points(), key=lambda point: point.step)  # (they end in any order)
        assert [(point.step, point.revision) for point in points] == [(step, 0) for step in steps]
        assert {str(point.outcome) for point in points} == {"ok"}
        assert len({point.provenance["snapshot"] for point in points}) == len(steps)
        assert len([one for one in r.records() if isinstance(one, Accepted)]) == len(steps)
        # evald has deleted nothing, the Trainer all but its last two
        assert {path.name for path in r.root.glob("checkpoint-*")} == {
            "checkpoint-10",
            "checkpoint-12",
        }
        assert json.loads((r.root / "trainer_state.json").read_bytes())["global_step"] == 12


def test_what_the_trainer_deletes_before_its_turn_is_missing(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python", delay_s=0.3)
    with rig(tmp_path, python=python, questions=100, staging=PRESET) as r:
        r.start()
        for step in (1, 2, 3):
            save("hf-trainer", r.root, step, seed=step)
        until(lambda: len([p for p in r.records() if isinstance(p, Accepted)]) == 3, "all accepted")
        until(lambda: [p["state"] for p in r.status()["running"]][:1] == ["evaluating"], "1 runs")
        # file by file, as rmtree does
        for path in sorted((r.root / "checkpoint-2").iterdir()):
            path.unlink()
        shutil.rmtree(r.root / "checkpoint-2")
        outcomes = [(str(r.point(step).outcome), r.point(step).reason) for step in (1, 2, 3)]
        assert [outcome for outcome, _ in outcomes] == ["ok", "skipped", "ok"]
        assert outcomes[1][1] == "ckpt_missing"
        assert "let the trainer keep more checkpoints" in r.point(2).detail
