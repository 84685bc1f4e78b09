"""One eval set of a running point: what is left to ask, what came back, what it comes to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from evald.errors import LedgerError
from evald.evals.graders import Grade, Rules
from evald.evals.kinds import Answer, kind_of
from evald.evals.preparation import PreparedSet, TooLong, name_some, too_long
from evald.evals.repetition import repeats
from evald.evals.rows import Question
from evald.evals.statistics import Statistics
from evald.postures.contract import SetResult
from evald.results.records import Counts
from evald.results.samples import SampleJournal, SampleRecord, Scored, Status
from evald.status.view import SetView

log = structlog.get_logger(__name__)

#: failures of one set that are logged; all of them are counted.
_MAX_LOGGED = 5


class Unasked(msgspec.Struct, frozen=True):
    """A question to ask, with the numbers of the samples that are missing."""

    #: position in the set.
    index: int
    question: Question
    #: what its kind made of the question.
    encoded: Any
    samples: list[int]


class SetRun:
    """State of one set: finished samples go to the journal, and only numbers of them stay here.

    ``done`` is set when every question was fed and every task of it has ended.
    """

    def __init__(self, prepared: PreparedSet, digest: str, journal: SampleJournal) -> None:
        self.prepared = prepared
        self.eval_set = prepared.loaded.eval_set
        self.kind = kind_of(self.eval_set)
        self.rules = Rules.of(self.eval_set, version=prepared.loaded.grader_version)
        self.done = asyncio.Event()
        self.expired = False
        self.started_s: float | None = None
        self.engines: set[str] = set()
        self.weight_versions: set[str] = set()
        #: the first failure, in words; empty without one.
        self.problem = ""
        self._digest = digest
        self._journal = journal
        self._n_done = 0
        self._counts = Counts()
        self._score_sum = 0.0
        self._n_failed = 0
        #: one byte for each sample: 1 if an earlier life of the point has scored it.
        self._resumed = bytearray(prepared.loaded.n_samples)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fed = False

    @property
    def name(self) -> str:
        """Name of the eval set."""
        return self.eval_set.name

    def resume(self) -> None:
        """Take in what an earlier life of the point has scored. Blocking; raises LedgerError."""
        position = {question.id: i for i, question in enumerate(self.prepared.loaded.questions)}
        with self._writing():
            records = self._journal.load(self._digest, self.prepared.config_digest)
        width = self.eval_set.n_samples_per_eval_prompt
        for (question_id, sample), record in records.items():
            index = position.get(question_id)
            if index is None or not 0 <= sample < width or record.score is None:
                continue
            self._resumed[index * width + sample] = 1
            self._answer_of(record)
            self._n_done += 1
            self._score_sum += record.score
            self._counts.n_resumed += 1
            self._count_scored(record)
        if self._counts.n_resumed:
            log.info("set_resumes", set=self.name, samples=self._counts.n_resumed)

    def left(self) -> Iterator[Unasked]:
        """Give the questions to ask; those that cannot be asked are counted as errors.

        A question whose answers may be long comes once for each of its samples.
        """
        is_long = self.eval_set.max_response_len > self.eval_set.list_up_to_tokens
        singly = is_long or self.kind.apart
        width = self.eval_set.n_samples_per_eval_prompt
        for index, prompt in enumerate(self.prepared.prompts):
            resumed = self._resumed[index * width : (index + 1) * width]
            samples = [sample for sample in range(width) if not resumed[sample]]
            if not samples:
                continue
            if isinstance(prompt, str):
                self.failed(index, samples, "error", prompt)
                continue
            for together in [[sample] for sample in samples] if singly else [samples]:
                yield Unasked(index, self._question(index), prompt, together)

    # --- the tasks of the set ------------------------------------------------------------------

    def watch(self, task: asyncio.Task[None]) -> None:
        """Belong to this set: the task counts for ``done`` and ends when the set expires."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def all_fed(self) -> None:
        """No task will be added any more."""
        self._fed = True
        self._settle()

    def expire(self) -> None:
        """Out of time: what is outstanding is cancelled, and counts as timed out."""
        if not self.expired and not self.done.is_set():
            self.expired = True
            log.warning("set_out_of_time", set=self.name, outstanding=len(self._tasks))
            for task in self._tasks:
                task.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._settle()

    def _settle(self) -> None:
        if self._fed and not self._tasks:
            self.done.set()

    # --- samples -------------------------------------------------------------------------------

    def graded(self, index: int, sample: int, answer: Answer, grade: Grade) -> None:
        """Take in a scored sample; raises LedgerError."""
        record = self._answered(self._question(index), sample, answer)
        record.status = "scored"
        record.score = grade.score
        record.self_graded = answer.grade is not None
        record.no_answer = grade.no_answer
        record.answer = grade.answer
        record.unfinished_thinking = grade.unfinished_thinking
        record.grader_reason = grade.reason
        self._record(record)

    def ungraded(self, index: int, sample: int, answer: Answer, reason: str) -> None:
        """Take in an answer that the grader could not grade; raises LedgerError."""
        record = self._answered(self._question(index), sample, answer)
        record.grader_reason = reason
        self._failure(record, reason)
        self._record(record)

    def failed(self, index: int, samples: list[int], status: Status, reason: str) -> None:
        """Take in samples that have no answer (``reason`` says more); raises LedgerError."""
        question = self._question(index)
        for sample in samples:
            record = SampleRecord(
                question=question.id,
                sample=sample,
                digest=self._digest,
                config=self.prepared.config_digest,
                status=status,
                too_long=isinstance(reason, TooLong),
                reference=question.label,
                grader_reason=str(reason),
            )
            self._failure(record, reason)
            self._record(record)

    def _question(self, index: int) -> Question:
        return self.prepared.loaded.questions[index]

    def _answered(self, question: Question, sample: int, answer: Answer) -> SampleRecord:
        generation = answer.generation
        return SampleRecord(
            question=question.id,
            sample=sample,
            digest=self._digest,
            config=self.prepared.config_digest,
            status="grader_error",
            truncated=generation.finish_reason == "length" and not self.kind.single,
            finish_reason=generation.finish_reason,
            response=generation.text,
            repeats=repeats(generation.text),
            n_tokens=len(generation.output_ids),
            reference=question.label,
            in_thought=answer.in_thought,
            values=answer.values,
            messages=answer.messages,
            engine=generation.engine,
            weight_version=generation.weight_version,
            latency_s=round(generation.latency_s, 6),
        )

    def _failure(self, record: SampleRecord, reason: str) -> None:
        self._n_failed += 1
        self.problem = self.problem or f"question {record.question} ({record.status}): {reason}"
        if self._n_failed <= _MAX_LOGGED:
            log.warning(
                "sample_failed",
                set=self.name,
                question=record.question,
                sample=record.sample,
                status=record.status,
                reason=reason,
            )

    def _record(self, record: SampleRecord) -> None:
        with self._writing():
            self._journal.append(record)
        self._take_in(record)

    def _take_in(self, record: SampleRecord) -> None:
        if record.status in {"scored", "grader_error"}:
            self._answer_of(record)
        self._n_done += 1
        self._score_sum += record.score or 0.0
        counts = self._counts
        match record.status:
            case "scored":
                self._count_scored(record)
            case "error":
                counts.n_error += 1
                counts.n_too_long += record.too_long
            case "grader_error":
                counts.n_grader_error += 1
            case "timeout":
                counts.n_timeout += 1

    def _answer_of(self, record: SampleRecord | Scored) -> None:
        self.engines.add(record.engine)
        # one text for all samples of an engine, not one for each
        self.weight_versions.add(sys.intern(record.weight_version))

    def _count_scored(self, record: SampleRecord | Scored) -> None:
        self._counts.n_scored += 1
        self._counts.n_truncated += record.truncated
        self._counts.n_no_answer += record.no_answer
        self._counts.n_unfinished_thinking += record.unfinished_thinking

    # --- results -------------------------------------------------------------------------------

    def too_long(self) -> list[str]:
        """Name the questions that were too long to ask, in one sentence or none."""
        if not self._counts.n_too_long:
            return []
        ids = too_long(self.prepared.loaded, self.prepared.prompts)
        return [f"{self.name}: too long for the context: questions {name_some(ids)}"]

    def counts(self) -> Counts:
        """Count all samples of the set; one without an outcome was cut by a deadline."""
        total = self.prepared.loaded.n_samples
        lost = total - self._n_done
        return msgspec.structs.replace(
            self._counts, n_total=total, n_timeout=self._counts.n_timeout + lost
        )

    async def result(self, now_s: float, statistics: Statistics) -> SetResult:
        """Compute the set's result from its closed journal; raises EvalSkip."""
        metrics = await statistics.of_set(self.prepared, self._digest, self._journal.path)
        seconds = 0.0 if self.started_s is None else now_s - self.started_s
        counts = self.counts()
        return SetResult(
            name=self.name,
            counts=counts,
            seconds=round(seconds, 6),
            metrics=metrics,
            too_few=counts.n_scored < (self.eval_set.min_eval_samples or 0),
        )

    def view(self) -> SetView:
        """Progress so far; the score counts failed samples as 0, as the headline will."""
        done = self._n_done
        score = self._score_sum / done if done else None
        return SetView(name=self.name, done=done, total=self.prepared.loaded.n_samples, score=score)

    def flush(self) -> None:
        """Hand finished samples to the operating system. Blocking; raises LedgerError."""
        with self._writing():
            self._journal.flush()

    def close(self) -> None:
        """Flush and close the journal. Blocking; raises LedgerError."""
        with self._writing():
            self._journal.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"cannot keep samples in {self._journal.path}: {error.strerror}; make room, or "
                "correct the rights, in results.dir"
            ) from error
