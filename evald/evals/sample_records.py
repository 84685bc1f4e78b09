"""What goes into the journal of one set of a point: a record for each sample, and their counts."""

from __future__ import annotations

from evald.evals.kinds import Answer, Kind
from evald.evals.preparation import PreparedSet
from evald.evals.repetition import repeats
from evald.results.records import Counts
from evald.results.samples import SampleRecord, Scored, Status


class SampleRecords:
    """Makes the records of one set's samples, of the weights with ``digest``."""

    def __init__(self, prepared: PreparedSet, kind: Kind, digest: str) -> None:
        self._prepared = prepared
        self._kind = kind
        self._digest = digest

    def answered(self, index: int, sample: int, answer: Answer) -> SampleRecord:
        """Begin the record of a sample with an answer, as one that could not be graded."""
        question = self._prepared.loaded.questions[index]
        generation = answer.generation
        return SampleRecord(
            question=question.id,
            sample=sample,
            digest=self._digest,
            config=self._prepared.config_digest,
            status="grader_error",
            truncated=generation.finish_reason == "length" and not self._kind.single,
            finish_reason=generation.finish_reason,
            response=generation.text,
            repeats=repeats(generation.text),
            n_tokens=answer.n_tokens,
            reference=question.label,
            in_thought=answer.in_thought,
            values=answer.values,
            messages=answer.messages,
            engine=generation.engine,
            weight_version=generation.weight_version,
            pieces=generation.pieces,
            latency_s=round(generation.latency_s, 6),
        )

    def unanswered(self, index: int, sample: int, status: Status, reason: str) -> SampleRecord:
        """Make the record of a sample that has no answer."""
        question = self._prepared.loaded.questions[index]
        return SampleRecord(
            question=question.id,
            sample=sample,
            digest=self._digest,
            config=self._prepared.config_digest,
            status=status,
            reference=question.label,
            grader_reason=reason,
        )


def count(counts: Counts, record: SampleRecord) -> None:
    """Add one sample to the counts."""
    match record.status:
        case "scored":
            count_scored(counts, record)
        case "error":
            counts.n_error += 1
            counts.n_too_long += record.too_long
        case "grader_error":
            counts.n_grader_error += 1
        case "timeout":
            counts.n_timeout += 1


def count_scored(counts: Counts, record: SampleRecord | Scored) -> None:
    """Add one sample that has a score."""
    counts.n_scored += 1
    counts.n_truncated += record.truncated
    counts.n_no_answer += record.no_answer
    counts.n_unfinished_thinking += record.unfinished_thinking
    counts.n_moved += bool(record.pieces)
