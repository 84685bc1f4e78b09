"""Two points on the same questions: their difference is known better than either of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

import msgspec

from evald.evals.stats.errors import Z80, Z95, mean_error
from evald.evals.stats.student_t import two_sided_p


class Difference(msgspec.Struct, frozen=True):
    """New minus old, over questions that have a score in both."""

    delta: float
    stderr: float
    #: two-sided, of the hypothesis that there is no difference.
    p: float
    n: int
    #: questions that were better, and worse, than before.
    up: int
    down: int

    @property
    def detectable(self) -> float:
        """Smallest true difference that is found with 80 % power at a 5 % level, two-sided.

        ``(z_0.975 + z_0.8) * stderr`` (Miller, arXiv 2411.00640, on power analysis).
        """
        return (Z95 + Z80) * self.stderr


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
    if binary and n_clusters == len(differences):
        p = mcnemar(up, down)
    else:
        p = t_test(delta, error, n_clusters)
    return Difference(delta, error, p, len(differences), up, down)


def t_test(delta: float, error: float, n_clusters: int) -> float:
    """Return the two-sided p of ``delta`` against 0."""
    if error == 0:
        return 1.0 if delta == 0 else 0.0
    return two_sided_p(delta / error, n_clusters - 1)


def mcnemar(up: int, down: int) -> float:
    """Return the exact two-sided p of ``up`` against ``down`` flips: a fair coin, twice the tail.

    Q. McNemar, Psychometrika 12 (1947) 153-157, in its exact binomial form.
    """
    flips = up + down
    tail = sum(math.comb(flips, i) for i in range(min(up, down) + 1))
    # whole numbers until the last step: 2 ** -flips alone would be 0 for many flips
    return min(1.0, 2 * tail / (1 << flips)) if flips else 1.0
