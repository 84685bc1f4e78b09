"""What math-verify and sgl-eval say about responses: ``python graders_reference.py < JOBS``.

JOBS is ``{"math": [[response, reference], ...], "choice": [[response, reference], ...]}``; for each
of them the answer has what math-verify's own functions and sgl-eval's graders make of it. A process
of its own: both set alarms, and sgl-eval is no part of evald.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from math_verify import parse, verify

# it has no types
from sgl_eval._vendored.nemo_skills.evaluator import mcq
from sgl_eval._vendored.nemo_skills.math_grader import (
    extract_answer,
    math_equal,
)


def choices(pairs: list[list[str]]) -> list[dict[str, Any]]:
    """Have sgl-eval grade a file of multiple choice answers, as it does."""
    mcq.tqdm = iter  # no progress bar
    rows = [{"generation": response, "expected_answer": label} for response, label in pairs]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "answers.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        mcq.eval_mcq({"input_file": str(path)})
        return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Answer all jobs on stdin."""
    logging.disable(logging.CRITICAL)
    jobs = json.load(sys.stdin)
    math = jobs["math"]
    answer = {
        "math_verify": [verify(parse(f"${gold}$"), parse(response)) for response, gold in math],
        "sgl_math": [math_equal(gold, extract_answer(response)) for response, gold in math],
        "sgl_choice": [row["predicted_answer"] for row in choices(jobs["choice"])],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
