"""Two points on the same questions: their difference is known better than either of them."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

import msgspec

from evald.evals.stats.errors import Z80, Z95, mean_error
from evald.evals.stats.student_t import regularised_beta, two_sided_p


class Difference(msgspec.Struct, frozen=True):
    """New minus old, over questions that have a score in both."""

    delta: float
    stderr: float
    #: two-sided, of the hypothesis that there is no difference; None where the differences have
    #: no spread from which it could be told.
    p: float | None
    n: int
    #: questions that were better, and worse, than before.
    up: int
    down: int

    @property
    def detectable(self) -> float | None:
        """Smallest true difference that is found with 80 % power at a 5 % level, two-sided.

        ``(z_0.975 + z_0.8) * stderr`` (Miller, arXiv 2411.00640, on power analysis); None without
        a spread: equal differences do not show how much they could have differed.
        """
        return (Z95 + Z80) * self.stderr if self.stderr else None


def difference(
    new: Sequence[float], old: Sequence[float], clusters: Sequence[Hashable], *, binary: bool
) -> Difference | None:
    """Compare question by question; None without two clusters.

    The standard error is that of the mean of the differences (Miller, arXiv 2411.00640, on paired
    differences; clustered). ``p``: McNemar's exact test where each question has one sample, right
    or wrong, and clusters are of one (``binary``); else a t test.
    """
    n_clusters = len(set(clusters))
    if n_clusters < 2:  # noqa: PLR2004 - a spread needs two
        return None
    differences = [a - b for a, b in zip(new, old, strict=True)]
    delta = statistics.fmean(differences)
    error = mean_error(differences, clusters)
    up = sum(value > 0 for value in differences)
    down = sum(value < 0 for value in differences)
    single = binary and n_clusters == len(differences)
    p = mcnemar(up, down) if single else t_test(delta, error, n_clusters)
    return Difference(delta, error, p, len(differences), up, down)


def t_test(delta: float, error: float, n_clusters: int) -> float | None:
    """Return the two-sided p of ``delta`` against 0; None for an error of 0."""
    if error == 0:
        return None
    return two_sided_p(delta / error, n_clusters - 1)


def mcnemar(up: int, down: int) -> float:
    """Return the exact two-sided p of ``up`` against ``down`` flips: a fair coin, twice the tail.

    Q. McNemar, Psychometrika 12 (1947) 153-157, in its exact binomial form.
    """
    # the tail of a binomial distribution is an incomplete beta function (Abramowitz and Stegun,
    # 26.5.24), which takes no longer for many flips
    fewer = min(up, down)
    return 1.0 if up == down else min(1.0, 2 * regularised_beta(0.5, up + down - fewer, fewer + 1))
