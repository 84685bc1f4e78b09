"""Every prompt is encoded once before the first point: in a process of its own.

A large tokenizer takes hundreds of megabytes, and nobody needs the token ids yet.
``python -m evald.prompt_check`` reads a Job from standard input and writes an Answer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from evald.config import EvalSet
from evald.errors import ConfigError, EvaldError
from evald.evals.preparation import check_prompts
from evald.evals.sets import load_set
from evald.log import configure_logging

#: encoding hundreds of thousands of prompts takes minutes.
TIMEOUT_S = 1800.0


class Job(msgspec.Struct):
    """What to encode; ``context_len`` in tokens."""

    sets: list[EvalSet]
    model_dir: str
    context_len: int | None


class Answer(msgspec.Struct):
    """Sentences: ``notes`` for people, ``problems`` that stop the daemon."""

    notes: list[str] = []
    problems: list[str] = []


async def check_prompts_apart(job: Job) -> list[str]:
    """Return the notes.

    Raises ConfigError when a set has no question that can be asked; EvaldError.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise EvaldError(
            f"cannot start {sys.executable} to check the prompts: {error.strerror}"
        ) from error
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate(msgspec.json.encode(job))
    except TimeoutError as error:
        raise EvaldError(f"cannot check the prompts within {TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise EvaldError(f"cannot check the prompts: the check ended with {process.returncode}")
    answer = msgspec.json.decode(output, type=Answer)
    if answer.problems:
        raise ConfigError(answer.problems)
    return answer.notes


def main() -> None:
    """Do one job."""
    configure_logging("warning")  # to standard error: standard output is for the answer
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(check(job)))


def check(job: Job) -> Answer:
    """Load the sets once more and encode their prompts."""
    try:
        sets = [load_set(eval_set) for eval_set in job.sets]
    except ConfigError as error:
        # they could be read a moment ago: what was read then is asked, whatever becomes of a file
        return Answer(notes=[f"WARNING: prompts not checked: {what}" for what in error.problems])
    try:
        return Answer(check_prompts(sets, Path(job.model_dir), context_len=job.context_len))
    except ConfigError as error:
        return Answer(problems=error.problems)


if __name__ == "__main__":
    main()
