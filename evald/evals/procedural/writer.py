"""The process that makes a procedural set's questions: ``python -m evald.evals.procedural.writer``.

A Job comes on standard input, as JSON; the rows go into the file that it names, one JSON object a
line; what is wrong, or null, goes to standard output.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from reasoning_gym.factory import DATASETS, create_dataset

from evald.evals.graders.python import in_words

#: what ``task_config`` may not name, and what sets it.
_OWN = {"size": "task_size", "seed": "task_seed"}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to make; two jobs with the same fields make the same rows."""

    task: str
    config: dict[str, Any]
    size: int
    seed: int
    #: with {question} in it.
    prompt: str


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the file that it goes into."""

    job: Job
    path: str


class Unmakeable(Exception):
    """The questions cannot be made; the sentence says why."""


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """Make the rows, prompt, label and what the verifier needs; raises Unmakeable."""
    try:
        dataset = create_dataset(job.task, size=job.size, seed=job.seed, **job.config)
        for number in range(job.size):
            item = dataset[number]
            yield {
                "prompt": job.prompt.replace("{question}", item["question"]),
                "label": item["answer"],
                "metadata": {
                    "task": job.task,
                    "config": job.config,
                    "question": item["question"],
                    "metadata": item["metadata"],
                },
            }
    # the library checks settings with assert, and raises anything at all
    except Exception as error:
        raise Unmakeable(f"task_config: {in_words(error)}") from error


def setting_fault(job: Job) -> str | None:
    """Say what is wrong with the names of settings, or None."""
    known = [field.name for field in dataclasses.fields(DATASETS[job.task][1])]
    for name in job.config:
        if name in _OWN:
            return f"task_config.{name}: set {_OWN[name]} instead"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            allowed = ", ".join(sorted(set(known) - _OWN.keys()))
            return f"task_config.{name}: unknown key; {hint}allowed here: {allowed}"
    return None


def write(order: Order) -> str | None:
    """Write the file; say what is wrong, or None."""
    if fault := setting_fault(order.job):
        return fault
    try:
        with Path(order.path).open("w", encoding="ascii") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows(order.job))
            file.flush()
            os.fsync(file.fileno())
    except Unmakeable as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"task_config: these settings make what JSON cannot hold: {error}"
    except OSError as error:
        return f"cannot write {order.path}: {error.strerror}"
    return None


def main() -> None:
    """Do one job."""
    # what the library prints must not stand in for the answer
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    answer.write(msgspec.json.encode(write(order)))
    answer.close()


if __name__ == "__main__":
    main()
