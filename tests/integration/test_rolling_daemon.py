"""A whole daemon whose points overlap: engines leave the stragglers of one for the next."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

from rig import Rig, rig, until

from evald.results.records import PointRecord
from evald.testing import Decode, write_fake_python, write_snapshot

STEPS = (1, 2, 3)
QUESTIONS = 16
#: most responses take a few steps of the engine, the longest of each point takes seconds.
DECODE = Decode(step_s=0.0015, slots=8, median_tokens=20, p99_tokens=1500)
SETS = """
[[eval]]
name = "a"
path = "a.jsonl"
grader = "boxed_exact"
n_samples_per_eval_prompt = 2
max_response_len = 1000
temperature = 1.0
"""


def three_points(work: Path, **dispatch: str) -> Any:
    """Give a rig whose three points are there from the start."""
    python = write_fake_python(work / "python", decode=DECODE)
    settings = {"max_in_flight": "3"} | dispatch
    return rig(
        work,
        python=python,
        questions=QUESTIONS,
        label="2",
        sets=False,
        tables=SETS,
        fleet="engines = 2\nmax_requests = 8",
        dispatch="\n".join(f"{name} = {value}" for name, value in settings.items()),
        staging="keep = 0",
    )


def drop_all(r: Rig) -> None:
    for step in STEPS:
        write_snapshot(r.root / f"step_{step}", seed=step, answer=step)


def began_s(point: PointRecord) -> float:
    """Tell when its evaluation began, by the ledger."""
    return point.time - point.timings.evaluate_s


def samples(r: Rig, step: int) -> list[dict[str, Any]]:
    path = r.work / "results" / "samples" / "t" / f"step_{step}.r0" / "a.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(r: Rig, step: int) -> PointRecord:
    """Every sample of a point is there once, of its own weights, and scored."""
    point = r.point(step, timeout_s=60)
    assert (point.outcome, point.counts.n_scored) == ("ok", 2 * QUESTIONS), point.detail
    # the weights of step 2 know the answer, if they come to it
    assert (point.metrics["eval/a"] > 0.5) == (step == 2)
    found = samples(r, step)
    assert len({(one["question"], one["sample"]) for one in found}) == len(found) == 2 * QUESTIONS
    label = f"t:{step}:{(point.digest or '')[:8]}:"
    assert {one["weight_version"].rpartition(":")[0] + ":" for one in found} == {label}
    assert {version.rpartition(":")[0] + ":" for version in point.weight_versions} == {label}
    return point


def evaluating(r: Rig) -> list[dict[str, Any]]:
    return [p for p in r.status().get("running", []) if p["state"] == "evaluating"]


def test_points_overlap_and_an_engine_that_dies_meanwhile_costs_nothing(tmp_path: Path) -> None:
    with three_points(tmp_path) as r:
        r.start()
        drop_all(r)
        both = until(lambda: evaluating(r)[1:] and evaluating(r), "two points are evaluated", 60)
        assert [p["step"] for p in both] == sorted(p["step"] for p in both)
        assert all(p["sets"][0]["total"] == 2 * QUESTIONS for p in both)
        os.kill(r.status()["engines"][0]["pid"], signal.SIGKILL)
        points = [check(r, step) for step in STEPS]
        for earlier, later in itertools.pairwise(points):
            assert began_s(later) < earlier.time - 0.2
        # it had no engine before, and its deadline did not run then
        assert points[2].timings.queued_s > 0.2
        assert r.stop() == 0


def test_points_wait_for_each_other_where_they_shall(tmp_path: Path) -> None:
    with three_points(tmp_path, rolling="false") as r:
        r.start()
        drop_all(r)
        points = [check(r, step) for step in STEPS]
        for earlier, later in itertools.pairwise(points):
            assert began_s(later) > earlier.time - 0.01


def test_a_daemon_that_is_killed_in_the_overlap_ends_both_points(tmp_path: Path) -> None:
    with three_points(tmp_path) as r:
        r.start()
        drop_all(r)
        until(lambda: evaluating(r)[1:], "two points are evaluated", 60)
        r.kill()
        r.start()
        for step in STEPS:
            check(r, step)
