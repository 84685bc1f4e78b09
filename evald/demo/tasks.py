r"""The five small tasks that the demo's trainer learns, and the questions it never sees.

Every answer is written as ``\boxed{...}``. One question in eight is held out by a hash of its
text: the trainer skips those, the eval sets hold nothing else, so a score is never memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

HELD_OUT_ONE_IN = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
#: shortest and longest string of the string tasks.
_LENGTHS = (3, 5)


class Question(NamedTuple):
    """What is asked and the bare answer."""

    text: str
    answer: str

    @property
    def response(self) -> str:
        """The text that a perfect model generates."""
        return f"\\boxed{{{self.answer}}}"

    @property
    def held_out(self) -> bool:
        """True for the one question in eight that training never sees."""
        return xxhash.xxh3_64_intdigest(self.text.encode()) % HELD_OUT_ONE_IN == 0


def _string(rng: random.Random, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(*_LENGTHS)))


def _copy(rng: random.Random) -> Question:
    word = _string(rng, _LETTERS)
    return Question(f"copy {word}", word)


def _reverse(rng: random.Random) -> Question:
    word = _string(rng, _LETTERS)
    return Question(f"reverse {word}", word[::-1])


def _sort(rng: random.Random) -> Question:
    digits = _string(rng, _DIGITS)
    return Question(f"sort {digits}", "".join(sorted(digits)))


def _max(rng: random.Random) -> Question:
    digits = _string(rng, _DIGITS)
    return Question(f"max {digits}", max(digits))


def _add(rng: random.Random) -> Question:
    left, right = rng.randrange(100), rng.randrange(100)
    return Question(f"{left}+{right}=", str(left + right))


class Task(NamedTuple):
    """One kind of question; ``weight`` is its share of the training batches."""

    name: str
    ask: Callable[[random.Random], Question]
    weight: float


#: addition learns last, so it gets half of the questions; max learns at once.
TASKS = (
    Task("copy", _copy, 1.0),
    Task("reverse", _reverse, 1.0),
    Task("sort", _sort, 1.0),
    Task("max", _max, 0.4),
    Task("add", _add, 3.0),
)


def training_questions(rng: random.Random) -> Iterator[Question]:
    """Yield training questions for ever, tasks by their weights, none of them held out."""
    weights = [task.weight for task in TASKS]
    while True:
        task = rng.choices(TASKS, weights)[0]
        question = task.ask(rng)
        if not question.held_out:
            yield question


def held_out_questions(task: Task, count: int, seed: int) -> list[Question]:
    """Return ``count`` different held-out questions of ``task``, the same for the same seed."""
    # reproducible data, nothing secret
    rng = random.Random(f"{task.name}:{seed}")  # noqa: S311
    found: dict[str, Question] = {}
    # the smallest pool (addition) holds about 1,250 held-out questions; max about 13,900
    if count > 1000:  # noqa: PLR2004 - explained above
        raise ValueError(f"cannot draw {count} held-out questions: at most 1000 for each task")
    while len(found) < count:
        question = task.ask(rng)
        if question.held_out:
            found.setdefault(question.text, question)
    return list(found.values())


def write_eval_sets(directory: Path, *, count: int = 100, seed: int = 0) -> list[Path]:
    """Write one JSONL eval set for each task: ``id``, ``prompt`` (chat messages), ``label``."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for task in TASKS:
        rows = [
            {
                "id": f"{task.name}-{number}",
                "prompt": [{"role": "user", "content": question.text}],
                "label": question.answer,
            }
            for number, question in enumerate(held_out_questions(task, count, seed))
        ]
        path = directory / f"{task.name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        paths.append(path)
    return paths
