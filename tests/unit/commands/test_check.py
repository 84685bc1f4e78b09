from __future__ import annotations

import json
from pathlib import Path

import pytest

from evald.cli import main
from evald.testing.snapshots import write_snapshot


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_snapshot(tmp_path / "base", marker=None)
    row = {"prompt": "1+1=", "label": "2"}
    (tmp_path / "sums.jsonl").write_text(json.dumps(row) + "\n")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no SGLang here >&2; exit 1\n")
    python.chmod(0o755)
    path = tmp_path / "node.toml"
    path.write_text(f"""
[staging]
root = "{tmp_path}/staging"
[results]
dir = "{tmp_path}/results"
[fleet]
model = "base"
device = "cpu"
python = "{python}"
[[fleet.group]]
name = "small"
engines = 2
[[fleet.group]]
name = "long"
sglang = {{ max_running_requests = 16 }}
[fleet.sglang]
context_length = 512
[[eval]]
name = "sums"
path = "sums.jsonl"
grader = "exact"
apply_chat_template = false
max_response_len = 8
""")
    return path


def test_check_shows_how_each_engine_is_started(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    for name in ("small-0", "small-1", "long-0"):
        assert f"engine {name}:\n  {config.parent}/python -W ignore " in out
    assert "--max-running-requests=128 --sleep-on-idle --context-length=512" in out
    assert "--port PORT --weight-version NONCE --config KEY.yaml" in out
    assert "max_running_requests = 16  (from [[fleet.group]] long)" in out
    assert "context_length = 512  (from [fleet.sglang])" in out
    assert "WARNING: names and types of server arguments are not checked: cannot ask" in out
    assert out.endswith("config is good\n")
    told = [line.split(" = ")[0] for line in out.splitlines() if line.startswith("eval[0].")]
    keys = ("apply_chat_template", "max_response_len", "name", "path")
    assert sorted(told) == [f"eval[0].{key}" for key in keys]


def test_what_cannot_be_inherited_is_a_bad_config(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with config.open("a") as file:
        file.write('[fleet.inherit]\ncommand = "--tp 8"\n')
    assert main(["check", str(config)]) == 78
    assert "no SGLang here" in capsys.readouterr().err


def test_sets_of_an_eval_yaml_are_checked_like_all_others(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = config.parent
    (directory / "sub").mkdir()
    (directory / "sub" / "eval.yaml").write_text("""
eval:
  defaults: {max_response_len: 8, apply_chat_template: false}
  datasets:
    2024: {path: '../sums.jsonl@[-1:]', rm_type: f1}
    long: {path: long.jsonl, rm_type: math, n_samples_per_eval_prompt: 2}
""")
    rows = [{"prompt": prompt, "label": "1"} for prompt in ("x", "x" * 3000)]
    (directory / "sub" / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config.write_text('eval_config = "sub/eval.yaml"\n' + config.read_text())
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert "eval[1].name = '2024'" in out
    assert "eval set 2024: 1 questions\neval set long: 2 questions" in out
    assert "'long': 1 of 2 questions cannot be asked: question 2: the prompt has" in out
    assert "too long for the context: 2\n" in out
    (directory / "sub" / "long.jsonl").write_text("{}")
    assert main(["check", str(config)]) == 78
    err = capsys.readouterr().err
    assert f"cannot read eval set 'long': {directory}/sub/long.jsonl line 1: key 'prompt'" in err
