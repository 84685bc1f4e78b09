"""One eval set of a running point: what is left to ask, what came back, what it comes to."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from evald.evals.encoding import Fault
from evald.evals.graders import Grade, Rules
from evald.evals.kinds import Answer, kind_of
from evald.evals.pace import Pace
from evald.evals.preparation import PreparedSet, name_some, too_long
from evald.evals.rows import Question
from evald.evals.sample_records import SampleRecords, count, count_scored
from evald.evals.statistics import Statistics
from evald.postures.contract import SetResult
from evald.results.records import Counts
from evald.results.samples import SampleJournal, SampleRecord, Scored, Status
from evald.status.view import SetView

log = structlog.get_logger(__name__)

#: failures of one set that are logged; all of them are counted.
_MAX_LOGGED = 5
#: a share of samples that should be a whole number may be a little more.
_ROUNDING = 1e-9


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
        #: it was ended before all of its samples were done.
        self.expired = False
        self.started_s: float | None = None
        self.engines: set[str] = set()
        self.weight_versions: set[str] = set()
        #: the first failure, in words; empty without one.
        self.problem = ""
        self._digest = digest
        self._journal = journal
        self._records = SampleRecords(prepared, self.kind, digest)
        self._n_done = 0
        self._pace = Pace()
        self._counts = Counts()
        self._score_sum = 0.0
        self._n_failed = 0
        #: one byte for each sample: 1 if an earlier life of the point has scored it.
        self._resumed = bytearray(prepared.loaded.n_samples)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fed = False
        #: what ended it early, in words.
        self._cut_by = ""
        self._closed = False
        #: done samples at which the others are stragglers, and cut off.
        share = self.eval_set.cut_at_share
        self._enough = math.inf if share is None else share * len(self._resumed) - _ROUNDING

    @property
    def name(self) -> str:
        """Name of the eval set."""
        return self.eval_set.name

    @property
    def path(self) -> Path:
        """Where its samples are kept."""
        return self._journal.path

    def resume(self) -> None:
        """Take in what an earlier life of the point has scored. Blocking; raises OSError."""
        position = {question.id: i for i, question in enumerate(self.prepared.loaded.questions)}
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
            count_scored(self._counts, record)
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
            if isinstance(prompt, Fault):
                self.failed(index, samples, "error", prompt.sentence, too_long=prompt.too_long)
                continue
            for together in [[sample] for sample in samples] if singly else [samples]:
                yield Unasked(index, self.prepared.loaded.questions[index], prompt, together)

    # --- the tasks of the set ------------------------------------------------------------------

    def watch(self, task: asyncio.Task[None]) -> None:
        """Belong to this set: the task counts for ``done`` and ends when the set expires."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def all_fed(self) -> None:
        """No task will be added any more."""
        self._fed = True
        self._settle()

    def expire(self, why: str) -> None:
        """End it early: what is outstanding is cancelled and aborted, and counts as timed out."""
        if not self.expired and not self.done.is_set():
            self.expired, self._cut_by = True, why
            log.warning("set_cut", set=self.name, why=why, outstanding=len(self._tasks))
            for task in self._tasks:
                task.cancel()

    def cut_stragglers(self) -> None:
        """End it early if enough of its samples are done."""
        if self._enough <= self._n_done < len(self._resumed):
            self.expire(f"cut_at_share = {self.eval_set.cut_at_share:g}")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._settle()

    def _settle(self) -> None:
        if self._fed and not self._tasks:
            self.done.set()

    # --- samples -------------------------------------------------------------------------------

    def graded(self, index: int, sample: int, answer: Answer, grade: Grade) -> None:
        """Take in a scored sample."""
        record = self._records.answered(index, sample, answer)
        record.status = "scored"
        record.score = grade.score
        record.self_graded = answer.grade is not None
        record.no_answer = grade.no_answer
        record.answer = grade.answer
        record.unfinished_thinking = grade.unfinished_thinking
        record.grader_reason = grade.reason
        self._record(record)

    def ungraded(self, index: int, sample: int, answer: Answer, reason: str) -> None:
        """Take in an answer that the grader could not grade."""
        record = self._records.answered(index, sample, answer)
        record.grader_reason = reason
        self._record(record, reason)

    def failed(
        self,
        index: int,
        samples: list[int],
        status: Status,
        reason: str,
        *,
        too_long: bool = False,
    ) -> None:
        """Take in samples that have no answer (``reason`` says more)."""
        for sample in samples:
            record = self._records.unanswered(index, sample, status, reason)
            record.too_long = too_long
            self._record(record, reason)

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

    def _record(self, record: SampleRecord, failure: str | None = None) -> None:
        if self.expired or self._closed:
            # counted as cut already: an answer that comes too late for this attempt never counts
            log.info("late_sample_dropped", set=self.name, question=record.question)
            return
        if failure is not None:
            self._failure(record, failure)
        with suppress(OSError):  # it stays in memory: ``flush`` tells
            self._journal.hold(record)
        self._take_in(record)
        self._pace.note()
        if self._n_done >= self._enough:
            # not at once: the task that brought this sample has others to hand over
            asyncio.get_running_loop().call_soon(self.cut_stragglers)

    def _take_in(self, record: SampleRecord) -> None:
        if record.status in {"scored", "grader_error"}:
            self._answer_of(record)
        self._n_done += 1
        self._score_sum += record.score or 0.0
        count(self._counts, record)

    def _answer_of(self, record: SampleRecord | Scored) -> None:
        for piece in record.pieces:
            self.engines.add(piece.engine)
            self.weight_versions.add(piece.weight_version)
        self.engines.add(record.engine)
        # one text for all samples of an engine, not one for each
        self.weight_versions.add(sys.intern(record.weight_version))

    # --- results -------------------------------------------------------------------------------

    def too_long(self) -> list[str]:
        """Name the questions that were too long to ask, in one sentence or none."""
        if not self._counts.n_too_long:
            return []
        ids = too_long(self.prepared.loaded, self.prepared.prompts)
        return [f"{self.name}: too long for the context: questions {name_some(ids)}"]

    def cut(self) -> list[str]:
        """Say how far it had come when it was ended early, in one sentence or none."""
        counts = self.counts()
        if not counts.n_cut:
            return []
        done = f"{counts.n_total - counts.n_cut} of {counts.n_total} samples were done"
        return [f"{self.name}: {done} when it was ended by {self._cut_by}"]

    def counts(self) -> Counts:
        """Count all samples of the set; one without an outcome was cut."""
        total = self.prepared.loaded.n_samples
        lost = total - self._n_done
        return msgspec.structs.replace(
            self._counts, n_total=total, n_timeout=self._counts.n_timeout + lost, n_cut=lost
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
        done, total = self._n_done, self.prepared.loaded.n_samples
        left_s = self._pace.left_s(0 if self.done.is_set() else total - done)
        return SetView(
            name=self.name,
            done=done,
            total=total,
            score=self._score_sum / done if done else None,
            left_s=None if left_s is None else round(left_s, 1),
        )

    def flush(self) -> None:
        """Hand finished samples to the operating system. Blocking; raises OSError."""
        self._journal.flush()

    def close(self) -> None:
        """Flush and close the journal: nothing counts any more. Blocking.

        Samples that cannot be written now are lost: they are asked for again if the point resumes.
        """
        self._closed = True
        try:
            self._journal.close()
        except OSError as error:
            log.warning("samples_lost", path=str(self.path), error=error.strerror)
