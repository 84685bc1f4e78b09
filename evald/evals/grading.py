"""Grading off the event loop: cheap graders here, the others in processes that can be killed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

import msgspec

from evald.evals.graders import (
    Grade,
    GraderFailed,
    Rules,
    Sample,
    answer_of,
    grade,
    sample_texts,
)
from evald.evals.graders.command import Command
from evald.evals.graders.external import grader_env
from evald.evals.graders.python import Python
from evald.evals.graders.remote import Remote
from evald.evals.remote_grading import RemoteService
from evald.evals.sets import LoadedSet
from evald.evals.worker import GradeJob, preload_python
from evald.evals.worker_pool import WorkerFailed, WorkerPool, Workers, WorkerTimedOut

#: graders without a pattern or an algebra system: at most 2 ms for each kilobyte.
INLINE = frozenset({"exact", "contains", "choice"})
#: a longer response goes to a worker, whatever its grader.
INLINE_CHARS = 8192
#: no further answer is begun in one step of the loop after this long.
_STEP_S = 0.01


class Grading:
    """Grades responses; what is not cheap and linear in the response leaves this process.

    ``workers`` grade what evald's own code grades. Graders of the user's own have processes of
    their own, with the part of ``environ`` that they may see, or are asked over HTTP.
    """

    def __init__(self, workers: Workers, *, environ: Mapping[str, str] = os.environ) -> None:
        self._workers = workers
        self._environ = environ
        #: spent on grading since the loop has last looked at anything else, seconds.
        self._spent_s = 0.0
        #: by rules, so that no set can change how another is graded.
        self._programs: dict[bytes, WorkerPool] = {}
        self._services: dict[bytes, RemoteService] = {}

    async def grade(self, rules: Rules, sample: Sample, *, timeout_s: float) -> Grade:
        """Grade one response; ``timeout_s`` runs from when a worker (or the service) takes it.

        Raises GraderFailed: the grader could not do its work, or ran out of time.
        """
        if not sample.response.isascii():
            # half a surrogate pair, in which a cut response may end, has no place in UTF-8
            text = sample.response.encode("utf-8", "replace").decode()
            sample = msgspec.structs.replace(sample, response=text)
        if rules.inner in INLINE and len(sample.response) <= INLINE_CHARS:
            return await self._grade_here(rules, sample_texts(sample))
        if rules.inner == "remote":
            return await self._ask(rules, sample, timeout_s)
        job = GradeJob.of(rules, sample)
        try:
            result = await self._workers_for(rules).run(job, timeout_s=timeout_s)
        except WorkerTimedOut as late:
            raise GraderFailed(
                f"cannot grade: {late}; raise grader_timeout_s if such answers are no accident"
            ) from late
        except WorkerFailed as failed:
            raise GraderFailed(str(failed)) from failed
        return _grades.decode(result)

    async def close(self) -> None:
        """End the processes and connections of the user's graders; ``workers`` are not ended."""
        pools, self._programs = self._programs, {}
        services, self._services = self._services, {}
        closing = [pool.close() for pool in pools.values()]
        await asyncio.gather(*closing, *(service.close() for service in services.values()))

    async def _grade_here(self, rules: Rules, sample: Sample) -> Grade:
        """Grade at once, unless answers that come together add up to a long step of the loop."""
        while self._spent_s > _STEP_S:  # noqa: ASYNC110 - for the loop's next turn
            await asyncio.sleep(0)
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._looked_up)
        began = time.perf_counter()
        try:
            return grade(rules, sample)
        finally:
            self._spent_s += time.perf_counter() - began

    def _looked_up(self) -> None:
        self._spent_s = 0.0

    async def _ask(self, rules: Rules, sample: Sample, timeout_s: float) -> Grade:
        answer = answer_of(rules, sample)
        if isinstance(answer, Grade):
            return answer
        key = msgspec.json.encode(rules.config, order="deterministic")
        if key not in self._services:
            settings = Remote(rules).settings
            token = settings.token_env and self._environ.get(settings.token_env)
            self._services[key] = RemoteService(settings, token=token)
        try:
            return await self._services[key].grade(answer, timeout_s=timeout_s)
        except TimeoutError as late:
            raise GraderFailed(
                f"cannot grade: {rules.config['url']} did not answer within {timeout_s:g} s; raise "
                "grader_timeout_s if it needs longer"
            ) from late

    def _workers_for(self, rules: Rules) -> Workers:
        if rules.inner not in {"python", "command"}:
            return self._workers
        key = msgspec.json.encode(rules, order="deterministic")
        if key not in self._programs:
            settings = (Python if rules.inner == "python" else Command)(rules).settings
            self._programs[key] = WorkerPool(
                size=settings.concurrency,
                preload=(preload_python(rules),) if rules.inner == "python" else (),
                env=grader_env(self._environ, settings.pass_env),
            )
        return self._programs[key]


def make_workers(sets: Sequence[LoadedSet], size: int = 2) -> WorkerPool:
    """Make processes for the work of evald's own on these sets; none starts before there is any."""
    math = any(one.eval_set.grader.endswith("math") for one in sets)
    return WorkerPool(size=size, preload=("math",) if math else ())


_grades: msgspec.msgpack.Decoder[Grade] = msgspec.msgpack.Decoder(Grade)
