"""Kind ``custom`` in a whole daemon: a function of the user's, beside ordinary sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rig import Rig, rig, until

from evald.results.records import SetRecord
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

_FUNCTION = '''
import asyncio, os
from evald.custom import Result


async def play(client, question):
    """Ask, use a tool on the answer, and ask again with all that was said."""
    messages = [{"role": "user", "content": question.prompt}]
    first = await client.generate(messages)
    if question.metadata == "raise":
        raise RuntimeError("the tool is broken")
    if question.metadata == "hang":
        await asyncio.sleep(600)
    if question.metadata == "kill":
        os._exit(9)
    found = await asyncio.to_thread(tool, first.text)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": f"The tool found {found}."},
    ]
    second = await client.generate(messages, max_new_tokens=client.config["tokens"])
    if question.metadata == "score":
        return Result(second.text, score=0.5, messages=messages)
    return Result(second.text, values={"found": found}, messages=messages)


def tool(text):
    return int("".join(c for c in text if c.isdigit())) * 2
'''
_SET = """
[[eval]]
name = "tools"
kind = "custom"
path = "tools.jsonl"
function = "my_tools:play"
function_config = { config = { tokens = 12 } }
metadata_key = "do"
n_samples_per_eval_prompt = 2
"""


def prepare(r: Rig, doing: list[str | None]) -> None:
    (r.work / "my_tools.py").write_text(_FUNCTION)
    rows = [{"prompt": f"{i}?", "label": "7", "do": what} for i, what in enumerate(doing, start=1)]
    (r.work / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    r.config.write_text(r.config.read_text() + _SET)


def samples(r: Rig, step: int) -> list[dict[str, Any]]:
    path = r.results.parent / "samples" / "t" / f"step_{step}.r0" / "tools.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_with_a_tool_and_every_fault(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python")
    dispatch = "sample_timeout_s = 4\nmax_error_share = 0.5"
    with rig(tmp_path, python=python, dispatch=dispatch) as r:
        prepare(r, [None] * 8 + ["score", "raise", "hang", "kill"])
        r.start()
        for step in (1, 2):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
            point = r.point(step, timeout_s=60)
            assert point.outcome == "ok", point.detail
            assert point.metrics["eval/a"] == 1.0
            (done,) = [
                record
                for record in r.records()
                if isinstance(record, SetRecord) and record.set == "tools" and record.step == step
            ]
            counts = done.counts
            assert (counts.n_total, counts.n_scored) == (24, 18)
            assert (counts.n_error, counts.n_timeout) == (4, 2)
            assert point.metrics["eval/tools"] == (8 + 0.5) / 12
            assert point.metrics["eval/tools/found"] == 14.0
            made_by = point.provenance["sets"]["tools"]
            assert made_by["function"] == "my_tools:play"
            assert "my_tools:play" in made_by["function_version"]
        by_question = {(one["question"], one["sample"]): one for one in samples(r, 2)}
        good = by_question["1", 0]
        assert good["response"] == "\\boxed{7}"
        assert [one["content"] for one in good["messages"]] == [
            "1?", "\\boxed{7}", "The tool found 14.",
        ]  # fmt: skip
        # both answers
        assert good["n_tokens"] == 2 * len("\\boxed{7}")
        assert ":2:" in good["weight_version"]
        assert (by_question["9", 0]["score"], by_question["9", 0]["self_graded"]) == (0.5, True)
        assert "raised RuntimeError: the tool is broken" in by_question["10", 1]["grader_reason"]
        assert by_question["11", 0]["status"] == "timeout"
        assert "it ended with exit code 9" in by_question["12", 0]["grader_reason"]
        # nothing of the functions outlives its point
        until(lambda: not list((r.results.parent / "functions").rglob("*.pid")), "no process")
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_a_daemon_that_is_killed_leaves_no_function_behind(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python")
    with rig(tmp_path, python=python) as r:
        prepare(r, ["hang"] * 4)
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        functions = r.results.parent / "functions"
        until(lambda: list(functions.rglob("*.log")), "the function runs")
        until(
            lambda: (
                [s["done"] for p in r.status()["running"] for s in p.get("sets", [])][:2]
                == [10, 10]
            ),
            "the other sets are done",
        )
        r.kill()
        until(lambda: not r.processes(), "no process is left", 20)
