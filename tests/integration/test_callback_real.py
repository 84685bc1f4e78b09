"""Real training with the callback against a running evald with real SGLang (CPU mode)."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, rig

from evald.demo.tasks import TASKS, held_out_questions

JOB = Path(__file__).with_name("sft_job.py")
MILES = Path(__file__).parents[1] / "unit" / "trainer" / "miles_stand_in"
QUESTIONS = 40


def write_questions(r: Rig) -> None:
    """Held-out questions of what the job learns, and of what it does not."""
    for name, file in (("max", "a"), ("add", "b")):
        task = next(task for task in TASKS if task.name == name)
        rows = [
            {"prompt": [{"role": "user", "content": question.text}], "label": question.answer}
            for question in held_out_questions(task, QUESTIONS, seed=0)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (r.work / f"{file}.jsonl").write_text(text)


def run_job(r: Rig) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(JOB), str(r.model), str(r.root), str(r.work / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    print(done.stdout[:-1].rpartition("\n")[0][-4000:])
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.timeout(400)
def test_sft_with_the_callback_and_then_miles(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, model=tiny_model) as r:
        write_questions(r)
        r.start()
        said = run_job(r)
        assert said["rollout_engines"] == []  # pure SFT

        # baseline, the due steps and the forced last one, off cadence: each ok, exactly once
        points = {point.step: point for point in r.points()}
        # (one may end while the one before it is graded)
        ends = sorted((str(point.kind), point.step, str(point.outcome)) for point in r.points())
        assert ends == [
            ("baseline", 0, "ok"),
            ("step", 20, "ok"),
            ("step", 40, "ok"),
            ("step", 45, "ok"),
        ]
        for step, point in points.items():
            assert point.counts.n_scored == point.counts.n_total == 2 * QUESTIONS
            assert {version.split(":")[1] for version in point.weight_versions} == {str(step)}

        # the curves came back before the job ended: in its log, and through its reporter
        history = {entry["step"]: entry for entry in said["log_history"] if "eval/a" in entry}
        assert sorted(history) == [0, 20, 40, 45]
        for step, point in points.items():
            for name, value in point.metrics.items():
                assert history[step][name] == pytest.approx(value), name
        scalars = {(name, step): value for name, value, step in said["scalars"]}
        assert {step for name, step in scalars if name == "eval/a"} == {0, 20, 40, 45}
        assert all(scalars["eval/a", step] == history[step]["eval/a"] for step in history)
        assert scalars["eval/a/response_len/mean", 45] > 0
        assert not [name for name, _ in scalars if name.startswith("train/eval")]
        assert {step for name, step in scalars if name == "train/loss"} == {10, 20, 30, 40}
        curve = [history[step]["eval/a"] for step in sorted(history)]
        assert curve[0] < curve[-1], curve
        print("max:", curve)

        hand_over_from_miles(r, monkeypatch)


def hand_over_from_miles(r: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same daemon measures a directory for miles, in place, and miles gets its samples."""
    monkeypatch.syspath_prepend(MILES)
    monkeypatch.setenv("EVALD_ROOT", str(r.root))
    monkeypatch.setenv("EVALD_TIMEOUT_S", "100")
    try:
        plug_in = importlib.import_module("evald.trainer.miles")
        types = importlib.import_module("miles.rollout.base_types")
        args = Namespace(hf_checkpoint="a-hub/id", reward_key=None)
        fn = plug_in.EvaldCheckpointEval(types.RolloutFnConstructorInput(args=args))
        directory = max(r.root.glob("step_*"), key=lambda path: path.stat().st_mtime)
        given = types.RolloutFnEvalInput(rollout_id=7, hf_dir=str(directory))
        output = asyncio.run(fn(given))
        fn.dispose()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "miles"]:
            del sys.modules[name]
        sys.modules.pop("evald.trainer.miles", None)
    point = r.point(7)
    rewards = output.data["a"]["rewards"]
    assert len(rewards) == len(output.data["a"]["samples"]) == QUESTIONS
    assert sum(rewards) / QUESTIONS == pytest.approx(point.metrics["eval/a"])
    assert output.metrics["eval/a"] == point.metrics["eval/a"]
    assert directory.exists()
