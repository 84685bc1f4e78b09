"""One eval set of a point: its stored samples are graded again, into another journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from evald.errors import LedgerError
from evald.evals.graders import GraderFailed, Rules, Sample
from evald.evals.grading import Grading
from evald.evals.sample_records import count
from evald.evals.sets import LoadedSet
from evald.point import PointKey
from evald.regrade.plan import CannotRegrade
from evald.results.records import Counts
from evald.results.samples import SampleJournal, SampleRecord, sample_file
from evald.results.stored_samples import StoredSamples

#: samples whose grades are under way; more of them only lie in memory.
_IN_FLIGHT = 64


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """A set as it was measured."""

    key: PointKey
    #: of the snapshot.
    digest: str
    #: of what the scores depended on.
    config: str
    n_questions: int
    n_samples_per_question: int
    counts: Counts


class SetRegrade:
    """Grades the samples of one set; what has no response, or graded itself, stays as it is.

    ``config``: digest of what the new scores depend on. ``on_sample`` is called with each sample
    that is done.
    """

    def __init__(
        self,
        loaded: LoadedSet,
        before: Before,
        *,
        config: str,
        grading: Grading,
        on_sample: Callable[[], None],
    ) -> None:
        self._loaded = loaded
        self._before = before
        self._config = config
        self._grading = grading
        self._on_sample = on_sample
        self._rules = Rules.of(loaded.eval_set, version=loaded.grader_version)
        self._questions = {question.id: question for question in loaded.questions}
        self._counts = Counts()
        #: the first failure, in words; empty without one.
        self.problem = ""

    async def run(self, results_dir: Path, journal: SampleJournal) -> Counts:
        """Grade, write to ``journal`` and close it; return the counts of the set.

        Raises CannotRegrade when samples are missing, and LedgerError when they cannot be read or
        written. At most 64 samples are in memory.
        """
        before = self._before
        path = sample_file(results_dir, before.key, self._loaded.name)
        stored = StoredSamples(
            path, before.digest, before.config, n_samples=before.n_samples_per_question
        )
        with _files():
            n_stored = await asyncio.to_thread(stored.count)
            counts = before.counts
            answered = counts.n_scored + counts.n_grader_error
            if n_stored < answered:
                raise CannotRegrade(
                    f"cannot regrade set {self._loaded.name!r} of {before.key}: {path} has "
                    f"{n_stored} of its samples, but {answered} had an answer: some are lost"
                )
            try:
                await self._grade_all(stored, journal)
            finally:
                journal.close()
        total = before.n_questions * before.n_samples_per_question
        # what has no record was cut by a deadline
        return msgspec.structs.replace(
            self._counts,
            n_total=total,
            n_cut=counts.n_cut,
            n_timeout=self._counts.n_timeout + max(total - n_stored, 0),
        )

    async def _grade_all(self, stored: StoredSamples, journal: SampleJournal) -> None:
        running: set[asyncio.Task[SampleRecord]] = set()
        try:
            async for record in _each(stored.batches()):
                if len(running) >= _IN_FLIGHT:
                    running = await self._take_in(running, journal)
                task = asyncio.create_task(
                    self._grade(record), name=f"regrade {record.question} sample {record.sample}"
                )
                running.add(task)
            while running:
                running = await self._take_in(running, journal)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _take_in(
        self, running: set[asyncio.Task[SampleRecord]], journal: SampleJournal
    ) -> set[asyncio.Task[SampleRecord]]:
        """Wait for the next sample and write it; return what is still under way."""
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            record = task.result()
            journal.append(record)
            self._count(record)
            self._on_sample()
        return running

    async def _grade(self, record: SampleRecord) -> SampleRecord:
        question = self._questions[record.question]
        fresh = msgspec.structs.replace(record, config=self._config, reference=question.label)
        if record.status in {"error", "timeout"} or record.self_graded:
            return fresh
        sample = Sample(
            response=record.response,
            label=question.label,
            prompt=question.prompt,
            metadata=question.metadata,
            question=question.id,
            in_thought=record.in_thought,
        )
        timeout_s = self._loaded.eval_set.grader_timeout_s
        try:
            grade = await self._grading.grade(self._rules, sample, timeout_s=timeout_s)
        except GraderFailed as failed:
            fresh.status, fresh.score, fresh.grader_reason = "grader_error", None, str(failed)
            fresh.no_answer = fresh.unfinished_thinking = False
            fresh.answer = ""
            return fresh
        fresh.status, fresh.score, fresh.grader_reason = "scored", grade.score, grade.reason
        fresh.no_answer = grade.no_answer
        fresh.unfinished_thinking = grade.unfinished_thinking
        fresh.answer = grade.answer
        return fresh

    def _count(self, record: SampleRecord) -> None:
        count(self._counts, record)
        if record.status != "scored" and not self.problem:
            self.problem = f"question {record.question} ({record.status}): {record.grader_reason}"


async def _each(batches: Iterator[list[SampleRecord]]) -> AsyncIterator[SampleRecord]:
    """Read in a thread, give one by one."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        for record in batch:
            yield record


@contextmanager
def _files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"cannot regrade: {error.filename or 'the samples'}: {error.strerror}; make room, or "
            "correct the rights, in results.dir"
        ) from error
