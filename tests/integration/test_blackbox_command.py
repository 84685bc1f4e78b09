"""Commands in real processes: how they may end, and the harness among them."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from blackbox_rig import Rig

from evald.config import BlackBox
from evald.postures.blackbox.config import check_black_box

COMMAND = """
import json, os, pathlib, subprocess, sys, time
directory, output, step, notes = sys.argv[1:]
with open(notes, "a") as file:
    file.write(f"built {os.getpid()}\\n")
output = pathlib.Path(output)
for what in (pathlib.Path(directory) / "do").read_text().split():
    if what == "skip": output.write_text('{"skip": "no_gpu", "detail": "none is free"}')
    if what == "declined": print("the queue is full", flush=True); sys.exit(75)
    if what == "skip75": output.write_text('{"skip": "no_gpu"}'); sys.exit(75)
    if what == "fail": print("Traceback\\nValueError: no such task", file=sys.stderr); sys.exit(1)
    if what == "kill": os.kill(os.getpid(), 9)
    if what == "hang": time.sleep(600)
    if what == "silent": sys.exit(0)
    if what == "garbage": output.write_text("{")
    if what == "child":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(notes, "a") as file:
            file.write(f"child {child.pid}\\n")
if not output.exists():
    output.with_name("math.jsonl").write_text('{"question": 7, "score": 1}\\n' * 3)
    output.write_text(json.dumps({"sets": {
        "math": {"metrics": {"score": int(step) / 10}, "samples": "math.jsonl", "seconds": 2},
        "short": 0.25}}))
"""


@pytest.fixture
async def command(tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "evaluate.py").write_text(COMMAND)
    words = [sys.executable, "evaluate.py", "{dir}", "{output}", "{step}", str(tmp_path / "notes")]
    async with Rig(tmp_path, command=words, timeout_s=3.0, stop_grace_s=0.5) as rig:
        yield rig


async def test_a_command_runs_once_for_each_point(command: Rig) -> None:
    result = await command.evaluate(1, "child")
    assert not command.alive()  # what it started in the background is gone as well
    assert result.metrics == {"eval/math": 0.1, "eval/short": 0.25}
    assert [(one.name, one.counts.n_total) for one in command.sets] == [("math", 3), ("short", 0)]
    assert command.sets[0].seconds == 2.0
    assert [sample.question for sample in command.samples(1)] == ["7", "7", "7"]
    assert (await command.evaluate(2)).metrics["eval/math"] == 0.2
    assert len(command.notes("built")) == len(command.logs()) == 2


@pytest.mark.parametrize(
    ("do", "reason", "says"),
    [
        ("skip", "no_gpu", "none is free"),
        ("skip75", "no_gpu", ""),
        ("declined", "declined", "exit code 75: the queue is full"),
        ("fail", "crashed", "exit code 1; last in .*: Traceback | ValueError: no such task"),
        ("kill", "crashed", "it was killed by signal 9; last in .*: nothing"),
        ("hang", "deadline", "not done in time"),
        ("silent", "crashed", "it wrote no results: neither results.json nor results_"),
        ("garbage", "crashed", "results.json: it is not JSON: "),
    ],
)
async def test_how_a_command_may_end(command: Rig, do: str, reason: str, says: str) -> None:
    skip = await command.skipped(1, f"child {do}")
    assert skip.reason == reason
    assert re.search(says, skip.detail), skip.detail
    assert not command.alive()
    assert not command.sets
    await command.evaluate(2)


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    async with Rig(tmp_path, command=["lm_evil", "{output}"]) as rig:
        skip = await rig.skipped(1)
        assert skip.reason == "crashed"
        assert "exit code 127" in skip.detail
        assert "lm_evil" in skip.detail


#: stands in for the harness: writes what lm_eval 0.4.13 writes, where it writes it.
LM_EVAL = """#!{python}
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
for name in ("model", "model_args", "device", "batch_size", "include_path", "tasks", "output_path"):
    parser.add_argument("--" + name, required=True)
parser.add_argument("--log_samples", action="store_true")
given = parser.parse_args()
assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
for task in given.tasks.split(","):
    assert pathlib.Path(given.include_path, task + ".yaml").is_file()
arguments = dict(word.split("=") for word in given.model_args.split(","))
assert pathlib.Path(arguments["pretrained"], "do").is_file()
path, date = pathlib.Path(given.output_path), "2026-01-02T03-04-05.678901"
tasks = given.tasks.split(",")
results = {{task: {{"alias": task, "acc,none": 0.5, "acc_stderr,none": 0.1}} for task in tasks}}
path.with_name(f"{{path.stem}}_{{date}}.json").write_text(json.dumps({{"results": results}}))
sample = {{"doc_id": 0, "target": "7", "filter": "none", "filtered_resps": ["7"], "acc": 1.0}}
for task in tasks:
    path.with_name(f"samples_{{task}}_{{date}}.jsonl").write_text(json.dumps(sample) + "\\n")
"""


async def test_the_worked_config_of_the_harness(tmp_path: Path) -> None:
    program = tmp_path / "lm_eval"
    program.write_text(LM_EVAL.format(python=sys.executable))
    program.chmod(0o755)
    configs = Path(__file__).parents[2] / "configs"
    text = (configs / "blackbox-lm-eval.toml").read_text()
    table = tomllib.loads(text.replace("${LM_EVAL:-/opt/lm-eval/bin/lm_eval}", str(program)))
    settings = {**table["blackbox"], "cwd": str(configs)}
    assert check_black_box(msgspec.convert(settings, BlackBox)) == []
    async with Rig(tmp_path, **settings) as rig:
        result = await rig.evaluate(1)
        assert result.metrics["eval/evald_sums"] == result.metrics["eval/evald_choice/acc"] == 0.5
        assert result.metrics["eval/evald_sums/stderr"] == 0.1
        assert [one.name for one in rig.sets] == ["evald_sums", "evald_choice"]
        assert [sample.response for sample in rig.samples(1, "evald_sums")] == ["7"]


async def test_logs_and_outputs_are_pruned(tmp_path: Path) -> None:
    words = ["sh", "-c", 'echo \'{"sets": {"a": 1}}\' > "$0"', "{output}"]
    async with Rig(tmp_path, command=words, keep_logs=2) as rig:
        for step in range(4):
            await rig.evaluate(step)
        assert [log.stem for log in rig.logs()] == ["0003", "0004"]
        outputs = rig.results_dir / "blackbox" / "outputs"
        assert sorted(path.name for path in outputs.iterdir()) == [
            "000003-r-step_2.r0",
            "000004-r-step_3.r0",
        ]
