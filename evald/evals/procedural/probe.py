"""Which tasks of the installed reasoning-gym are fit for a curve: what the list is made with.

``python -m evald.evals.procedural.probe [--size N] [--hash-seeds N] [TASK ...]`` tries every task,
or those that are named, in processes with different PYTHONHASHSEEDs, and prints a verdict for each.
A task is fit when its questions are the same in all of them, its verifier takes the reference
answer once it has been in a file, and no junk answer makes the verifier raise, hang, run the answer
as code, or give full marks.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from reasoning_gym.factory import DATASETS

from evald.evals.procedural.tasks import Unfit
from evald.evals.procedural.verifier import FULL_MARKS, raw_marks
from evald.evals.procedural.writer import Job, Unmakeable, rows

#: seeds of the questions that are made.
SEEDS = (7, 1_234_567)
#: seconds for the questions of one seed, and for one answer.
_MAKE_TIMEOUT_S = 120
_SCORE_TIMEOUT_S = 20

_MARK = "evald_ran_an_answer"
_CALL = f"__import__('builtins').__dict__.setdefault({_MARK!r}, 1)"
#: answers that leave a mark where they are run as Python code.
CODE = (
    _CALL,
    f"[{_CALL}]",
    f"[[{_CALL}]]",
    f"[str({_CALL})]",
    f"({_CALL},)",
    f"{{'a': {_CALL}}}",
    f"1 + {_CALL}",
    f"x + {_CALL}",
)
#: answers that nobody means.
JUNK = (
    " ", "junk", "None", "null", "True", "yes", "No", "nan", "-nan", "inf", "-inf", "1e999", "nanj",
    "0", "1", "-1", "0.0", "1/0", "0/0", "x", "x = 1", "a,b,c", "1 2 3\n4 5 6", "1, 2, 3",
    "[]", "{}", "()", "[[]]", "[{}]", "[[[]]]", "[1, 2", '{"a": 1}', '["a"]', '[["a", "b"]]',
    "[1, 2, 3]", "[[1, 2], [3, 4]]", "((((((", "'\"", "\\", "%", "\x00", "\x7f", "\t", "\ufffd",
    "\u202e\u0000", "é∑漢字🙂", "<answer></answer>", "\\boxed{}", "\\frac{}{}", "A", "E", "-", "_",
    "9" * 5000, "a" * 20_000, "1 " * 5000, "[" * 3000, "(" * 3000, "-" * 3000, "\n" * 1000 + "0",
    "\n".join(["1 2"] * 50), "I do not know.", "The answer is 42.", "```python\nprint(1)\n```",
)  # fmt: skip


class TookTooLong(Exception):
    """A task did not come to an end."""


class Found(msgspec.Struct):
    """What one process has found out about a task."""

    #: of questions and answers; "" when they could not be made.
    digest: str = ""
    unfit: Unfit | None = None
    #: the answer that showed it, or what was raised.
    by: str = ""


def probe(task: str, size: int) -> Found:
    """Try a task with ``size`` questions of each seed."""
    found = Found()
    try:
        made = [_make(task, size, seed) for seed in SEEDS]
    except (Unmakeable, TookTooLong) as error:
        return Found(unfit=Unfit.SETTINGS, by=str(error))
    except (TypeError, ValueError) as error:
        return Found(unfit=Unfit.NOT_JSON, by=str(error))
    found.digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
    for row in (row for part in made for row in part):
        found.unfit, found.by = _try(row)
        if found.unfit is not None:
            break
    return found


def _make(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    with _limit(_MAKE_TIMEOUT_S):
        job = Job(task=task, config={}, size=size, seed=seed, prompt="{question}")
        made: list[dict[str, Any]] = json.loads(json.dumps(list(rows(job)), allow_nan=False))
        return made


def _try(row: dict[str, Any]) -> tuple[Unfit | None, str]:
    """Try the verifier on one question: why it is unfit, and by which answer."""
    reference = row["label"]
    if not isinstance(reference, str):
        return Unfit.NO_REFERENCE, ""
    if (marks := _marks(reference.strip(), row)) != FULL_MARKS:
        return Unfit.REFERENCE, f"{marks} for {reference[:60]!r}"
    for answer in CODE:
        _marks(answer, row)
        if builtins.__dict__.pop(_MARK, None):
            return Unfit.RUNS_CODE, answer
    for answer in JUNK:
        marks = _marks(answer, row)
        if isinstance(marks, str):
            return Unfit.RAISES, f"{marks} for {answer[:60]!r}"
        if marks >= FULL_MARKS and not _means(answer, reference):
            return Unfit.REWARDS_JUNK, f"{answer[:60]!r} for {reference[:60]!r}"
    return None, ""


def _means(answer: str, reference: str) -> bool:
    """Whether an answer that was meant as junk happens to be right."""
    if answer.strip().lower() == reference.strip().lower():
        return True
    with contextlib.suppress(ValueError):
        return float(answer) == float(reference)
    return False


def _marks(answer: str, row: dict[str, Any]) -> float | str:
    """Return what the verifier gives, or say what it raises."""
    try:
        with _limit(_SCORE_TIMEOUT_S):
            return raw_marks(answer, row["label"], row["metadata"])
    # it may raise anything, and that is what is asked here
    except Exception as error:  # noqa: BLE001 - see above
        return f"{type(error).__name__}: {error}"[:200]


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(_signum: int, _frame: object) -> None:
        raise TookTooLong(f"longer than {seconds} s")

    before: Callable[[int, Any], Any] | int | None = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def probe_all(tasks: Sequence[str], size: int, hash_seeds: Sequence[int]) -> dict[str, Found]:
    """Try tasks in one process for each hash seed, at the same time; the verdicts together."""
    words = [sys.executable, "-m", __name__, "--here", "--size", str(size), *tasks]
    started = [
        subprocess.Popen(  # noqa: S603 - this module
            words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in hash_seeds
    ]
    outputs = [process.communicate()[0] for process in started]
    parts = [msgspec.json.decode(output, type=dict[str, Found]) for output in outputs]
    together = {}
    for task, first in parts[0].items():
        others = [part[task] for part in parts]
        worst = next((one for one in others if one.unfit is not None), first)
        if worst.unfit is None and len({one.digest for one in others}) > 1:
            worst = Found(first.digest, Unfit.HASH_SEED)
        together[task] = worst
    return together


def main() -> None:
    """Try, and print."""
    parser = argparse.ArgumentParser(prog="python -m evald.evals.procedural.probe")
    parser.add_argument("--size", type=int, default=8, help="questions of each of two seeds")
    parser.add_argument("--hash-seeds", type=int, default=2, help="processes to compare")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="names; none: all there are")
    args = parser.parse_args()
    tasks = args.tasks or sorted(DATASETS)
    if args.here:
        answer = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        answer.write(msgspec.json.encode({task: probe(task, args.size) for task in tasks}))
        answer.close()
        return
    for task, found in probe_all(tasks, args.size, range(args.hash_seeds)).items():
        verdict = "fit" if found.unfit is None else f"{found.unfit.name}  {found.by}"
        print(f"{task:28} {verdict}")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
