from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evald.evals.grading import INLINE_CHARS
from evald.testing import hostile_answers

BENCH = Path(__file__).parents[2] / "bench" / "hostile_answers.py"


#: s for one answer: short where some use it up, long where none does, however slow the machine.
TIMEOUT_S = {"boxed_math": "1.0", "choice": "20"}


@pytest.fixture(scope="module", params=list(TIMEOUT_S))
def grader(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def figures(grader: str) -> dict[str, Any]:
    """What the bench prints: the real evaluator, with thirty hostile and ten good answers a set."""
    done = subprocess.run(
        [sys.executable, BENCH, "--timeout", TIMEOUT_S[grader], "--graders", grader],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    return figures


def test_hostile_answers_cost_themselves_and_nothing_else(
    figures: dict[str, Any], grader: str
) -> None:
    one = figures["sets"][grader]
    counts = one["counts"]
    assert one["hostile"] == 30
    assert counts["n_total"] == 40
    # every good answer is right, and no hostile one
    assert one["right"] == one["good"] == 10
    # each has its own outcome: a score, or a grader that gave up; nothing was lost or cut
    assert counts["n_scored"] + counts["n_grader_error"] == 40
    assert (counts["n_error"], counts["n_timeout"]) == (0, 0)
    if grader == "choice":
        assert (counts["n_grader_error"], counts["n_no_answer"]) == (0, 30)
    else:
        assert counts["n_grader_error"] >= 8
        assert counts["n_no_answer"] >= 3


def test_the_loop_goes_on_meanwhile(figures: dict[str, Any]) -> None:
    # CPU time of the loop's thread in one go, about 15 ms: what other processes do is not in it,
    # but what is taken from a virtual machine is
    assert figures["step_ms"] < 250
    assert INLINE_CHARS <= 32_768


def test_there_are_thirty_and_each_is_another() -> None:
    assert len(set(hostile_answers().values())) == 30
