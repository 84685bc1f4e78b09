from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from evald.demo.tasks import (
    TASKS,
    Question,
    held_out_questions,
    training_questions,
    write_eval_sets,
)


def answer(text: str) -> str:
    """Solve a question from its text alone."""
    if text.endswith("="):
        return str(sum(int(n) for n in text[:-1].split("+")))
    command, word = text.split()
    solved = {
        "copy": word,
        "reverse": word[::-1],
        "sort": "".join(sorted(word)),
        "max": max(word),
    }
    return solved[command]


def test_answers_are_right_and_boxed() -> None:
    rng = random.Random(1)  # noqa: S311 - test data
    for question in itertools.islice(training_questions(rng), 500):
        assert question.answer == answer(question.text)
        assert question.response == f"\\boxed{{{question.answer}}}"


def test_training_never_sees_a_held_out_question() -> None:
    rng = random.Random(2)  # noqa: S311 - test data
    seen = {q.text for q in itertools.islice(training_questions(rng), 20_000)}
    for task in TASKS:
        held_out = {question.text for question in held_out_questions(task, 100, 0)}
        assert len(held_out) == 100
        assert not held_out & seen


def test_one_question_in_eight_is_held_out() -> None:
    sums = [Question(f"{a}+{b}=", "") for a in range(100) for b in range(100)]
    assert sum(question.held_out for question in sums) == pytest.approx(1250, rel=0.1)


def test_eval_sets_are_reproducible_and_readable(tmp_path: Path) -> None:
    first = write_eval_sets(tmp_path / "a", count=20)
    second = write_eval_sets(tmp_path / "b", count=20)
    assert [path.name for path in first] == [f"{task.name}.jsonl" for task in TASKS]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
        rows = [json.loads(line) for line in one.read_text().splitlines()]
        assert len({row["id"] for row in rows}) == 20
        for row in rows:
            assert row["prompt"][0]["role"] == "user"
            assert row["label"] == answer(row["prompt"][0]["content"])


def test_more_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1000"):
        held_out_questions(TASKS[0], 1001, 0)
