"""Every kind on real SGLang (CPU, float32): likelihoods are those of transformers on the weights.

A second snapshot of the same weights gives the same numbers, or, where answers are drawn, numbers
within their error bars.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_environ import plain_environ
from rig import Rig, rig

START_S = 180.0
POSTURE = """
[fleet]
model = "{model}"
device = "cpu"
engines = 1
[fleet.sglang]
dtype = "float32"
[[eval]]
name = "text"
path = "text.jsonl"
kind = "perplexity"
[[eval]]
name = "answer"
path = "answer.jsonl"
kind = "perplexity"
perplexity_of = "response"
[[eval]]
name = "choice"
path = "choice.jsonl"
kind = "loglikelihood_choice"
options_key = "options"
[[eval]]
name = "words"
path = "words.jsonl"
grader = "boxed_exact"
max_response_len = 16
[[eval]]
name = "sums"
kind = "procedural"
task = "chain_sum"
task_size = 4
max_response_len = 8
[[eval]]
name = "greedy"
kind = "custom"
path = "words.jsonl"
function = "my_game:play"
max_response_len = 8
[[eval]]
name = "drawn"
kind = "custom"
path = "words.jsonl"
function = "my_game:play"
max_response_len = 8
temperature = 1.0
n_samples_per_eval_prompt = 4
"""
FUNCTION = '''
from evald.custom import Result


async def play(client, question):
    """Ask, and ask again with the answer; an untrained model's answers are letters and others."""
    first = await client.generate([{"role": "user", "content": question.prompt}])
    again = await client.generate(first.prompt_ids + first.output_ids + first.prompt_ids[-4:])
    text = first.text + again.text
    share = sum(c.isalpha() for c in text) / max(len(text), 1)
    return Result(again.text, score=share, values={"turns": 2.0})
'''
TEXTS = [
    "a short one",
    "The quick brown fox jumps over the lazy dog. " * 30,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
]
CHOICES: list[dict[str, Any]] = [
    {"prompt": "copy abc", "options": ["abc", "cba", "a b c d e f"], "label": 0},
    {"prompt": "the answer is ", "options": ["yes", "no"], "label": "no"},
]


def drop(r: Rig, step: int) -> None:
    directory = r.root / f"step_{step}"
    shutil.copytree(r.model, directory)
    (directory / ".complete").touch()


def samples(r: Rig, step: int, name: str) -> list[dict[str, Any]]:
    path = r.work / "results" / "samples" / "t" / f"step_{step}.r0" / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["question"]))


def responses(r: Rig, step: int, name: str) -> list[str]:
    found = samples(r, step, name)
    assert all(f":{step}:" in sample["weight_version"] for sample in found)
    return [s["response"] for s in sorted(found, key=lambda s: (int(s["question"]), s["sample"]))]


def reference(model: Path, jobs: list[dict[str, Any]]) -> list[list[float]]:
    script = Path(__file__).with_name("likelihood_reference.py")
    done = subprocess.run(
        [sys.executable, script, model],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=plain_environ(),
    )
    answers: list[list[float]] = json.loads(done.stdout)
    return answers


@pytest.mark.timeout(400)
def test_oracle_transformers_gives_the_same_likelihoods_and_every_kind_repeats(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"prompt": text} for text in TEXTS],
        "answer": [{"prompt": "say: ", "label": "good day"}],
        "choice": CHOICES,
        "words": [{"prompt": f"copy {i}", "label": str(i)} for i in range(20)],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "my_game.py").write_text(FUNCTION)
    with rig(tmp_path, model=tiny_model, posture=POSTURE, sets=False) as r:
        r.start()
        drop(r, 1)
        first = r.point(1, timeout_s=START_S)
        assert str(first.outcome) == "ok", first.detail
        jobs = [{"prefix": None, "text": text} for text in TEXTS]
        jobs.append({"prefix": "say:", "text": " good day"})
        for row in CHOICES:
            prefix = row["prompt"].rstrip()
            spaces = row["prompt"][len(prefix) :]
            jobs += [{"prefix": prefix, "text": f"{spaces} {o}"} for o in row["options"]]
        expected = reference(tiny_model, jobs)
        scored = samples(r, 1, "text") + samples(r, 1, "answer")
        for sample, (total, count) in zip(scored, expected, strict=False):
            assert sample["values"]["tokens"] == count
            assert sample["values"]["nll"] / count == pytest.approx(-total / count, abs=1e-3)
        sums = [total for total, _ in expected[len(scored) :]]
        for sample, row in zip(samples(r, 1, "choice"), CHOICES, strict=True):
            options = row["options"]
            mine, sums = sums[: len(options)], sums[len(options) :]
            assert sample["answer"] == options[mine.index(max(mine))]
            words = sample["grader_reason"].removeprefix("log-probabilities: ").split(", ")
            assert [float(word.split(": ")[-1]) for word in words] == pytest.approx(mine, abs=2e-3)

        # the same weights once more, under another step: every kind gives the same numbers
        drop(r, 2)
        second = r.point(2, timeout_s=60)
        assert str(second.outcome) == "ok", second.detail
        for name in ("text", "answer", "choice", "words", "sums", "greedy"):
            key = f"eval/{name}"
            assert second.metrics[key] == pytest.approx(first.metrics[key], abs=1e-4)
            if f"{key}/stderr" in first.metrics:
                assert second.metrics[f"{key}/delta_prev"] == pytest.approx(0, abs=1e-4)
            assert f"{key}/delta_prev" not in first.metrics
        total = sum(count for _, count in expected[: len(TEXTS)])
        assert first.metrics["eval/text/tokens"] == total
        assert responses(r, 1, "greedy") == responses(r, 2, "greedy")
        # answers that are drawn are others, with about the same score
        assert responses(r, 1, "drawn") != responses(r, 2, "drawn")
        assert 0 < first.metrics["eval/drawn"] < 1
        delta = second.metrics["eval/drawn/delta_prev"]
        assert 0 < abs(delta) < 4 * second.metrics["eval/drawn/delta_prev_stderr"]
        for name, count in (("greedy", 20), ("drawn", 80)):
            assert first.metrics[f"eval/{name}/turns"] == 2
            # the tokens of both answers
            lengths = [sample["n_tokens"] for sample in samples(r, 1, name)]
            assert len(lengths) == count
            assert max(lengths) == 16
