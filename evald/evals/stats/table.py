"""The samples of one set at one point, as a table of questions by samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from evald.evals.stats.samples import Sample, Samples


class Table:
    """The samples of one point's set, by question in the set's order.

    ``n``: samples of each question; what has a higher number is not the point's. ``clusters``: of
    the questions, "" for one of its own.
    """

    def __init__(
        self, samples: Samples, questions: Sequence[str], clusters: Sequence[str], *, n: int
    ) -> None:
        self.n = n
        self.rows: list[list[Sample]] = [
            [s for number, s in sorted(samples.get(q, {}).items()) if number < n] for q in questions
        ]
        #: each question without a cluster is one of its own.
        self.clusters: list[str | int] = [
            cluster or position for position, cluster in enumerate(clusters)
        ]
        self.all = [sample for row in self.rows for sample in row]
        self.scored = [sample for sample in self.all if sample.status == "scored"]
        self.answered = [sample for sample in self.all if sample.answered]

    @property
    def clusters_of_scored(self) -> list[str | int]:
        """The clusters of the samples that have a score."""
        return [
            cluster
            for row, cluster in zip(self.rows, self.clusters, strict=True)
            for sample in row
            if sample.status == "scored"
        ]

    @property
    def is_binary(self) -> bool:
        """Whether every score is right or wrong."""
        return all(sample.score in {0.0, 1.0} for sample in self.scored)

    @property
    def in_unit(self) -> bool:
        """Whether every score is between 0 and 1."""
        return all(0 <= (sample.score or 0.0) <= 1 for sample in self.scored)

    def complete(self) -> dict[int, float]:
        """Mean score of each question whose samples all have one, by position."""
        return {
            position: statistics.fmean(sample.score or 0.0 for sample in row)
            for position, row in enumerate(self.rows)
            if len(row) == self.n and all(sample.status == "scored" for sample in row)
        }

    def ratios(self, key: str) -> dict[str, float]:
        """Shares of all samples, whatever has come of them."""
        total = len(self.rows) * self.n
        lost = total - len(self.all)

        def share(test: Callable[[Sample], bool], more: int = 0) -> float:
            return (sum(map(test, self.all)) + more) / total

        return {
            f"{key}-truncated_ratio": share(lambda s: s.truncated),
            f"{key}-none_reward_ratio": 1 - len(self.scored) / total,
            f"{key}/no_answer_ratio": share(lambda s: s.no_answer),
            f"{key}/unfinished_thinking_ratio": share(lambda s: s.unfinished_thinking),
            f"{key}/error_ratio": share(lambda s: s.status == "error"),
            f"{key}/too_long_ratio": share(lambda s: s.too_long),
            f"{key}/grader_error_ratio": share(lambda s: s.status == "grader_error"),
            # what has no record at all was cut by a deadline
            f"{key}/timeout_ratio": share(lambda s: s.status == "timeout", lost),
        }
