"""Standard errors and 95 % intervals of means and ratios over questions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from evald.evals.stats.student_t import critical

CONFIDENCE = 0.95
#: two-sided 95 % and one-sided 80 % of the normal distribution.
Z95 = statistics.NormalDist().inv_cdf(0.975)
Z80 = statistics.NormalDist().inv_cdf(0.8)

Interval = tuple[float, float]


def mean_error(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Return the standard error of the mean of ``values``, which are dependent within clusters.

    ``sqrt(G / (G - 1) * sum over clusters of (sum of deviations)^2) / n`` for G clusters: the
    clustered standard error of E. Miller, Adding Error Bars to Evals (arXiv 2411.00640), with the
    usual small-sample factor, so that clusters of one give ``s / sqrt(n)``. Needs two clusters.
    """
    mean = statistics.fmean(values)
    return _clustered([value - mean for value in values], clusters) / len(values)


def ratio_error(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable]
) -> float:
    """Return the standard error of ``sum(numerators) / sum(denominators)``.

    Linearised: the deviations are ``y - r x`` (Cochran, Sampling Techniques, 3rd ed., 6.4), summed
    within clusters as in ``mean_error``. Needs two clusters.
    """
    ratio = math.fsum(numerators) / math.fsum(denominators)
    residuals = [y - ratio * x for y, x in zip(numerators, denominators, strict=True)]
    return _clustered(residuals, clusters) / math.fsum(denominators)


def _clustered(deviations: Sequence[float], clusters: Sequence[Hashable]) -> float:
    sums: dict[Hashable, float] = defaultdict(float)
    for deviation, cluster in zip(deviations, clusters, strict=True):
        sums[cluster] += deviation
    n_clusters = len(sums)
    total = math.fsum(value * value for value in sums.values())
    return math.sqrt(total * n_clusters / (n_clusters - 1))


def within_error(samples: Sequence[Sequence[float]]) -> float:
    """Return the part of the mean's standard error that comes from sampling the answers.

    ``sqrt(sum over questions of s_q^2 / n_q) / Q``: what is left if the same Q questions are asked
    again (Miller, arXiv 2411.00640, on resampling). ``samples``: the scores of each question, two
    or more.
    """
    total = math.fsum(statistics.variance(scores) / len(scores) for scores in samples)
    return math.sqrt(total) / len(samples)


def wilson(successes: float, n: float) -> Interval:
    """Return Wilson's 95 % score interval for ``successes`` of ``n`` (> 0) independent questions.

    E. B. Wilson, JASA 22 (1927) 209-212; right also for few questions and for 0 or n successes.
    """
    share, square = successes / n, Z95 * Z95
    centre = (share + square / (2 * n)) / (1 + square / n)
    spread = Z95 * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    # exact at the ends, where rounding would leave some 1e-17
    low = 0.0 if successes == 0 else max(0.0, centre - spread)
    return low, 1.0 if successes == n else min(1.0, centre + spread)


def t_interval(mean: float, error: float, n_clusters: int) -> Interval:
    """Return ``mean`` with 95 % of Student's t around it, for ``n_clusters`` (2 or more)."""
    half = critical(CONFIDENCE, n_clusters - 1) * error
    return mean - half, mean + half


def share_interval(values: Sequence[float], clusters: Sequence[Hashable], error: float) -> Interval:
    """Return the 95 % interval of the mean of values between 0 and 1.

    Wilson's for independent questions that are right or wrong, and where all agree (t would have
    no width then; n is the number of clusters); else Student's t, cut at 0 and 1.
    """
    mean, n_clusters = statistics.fmean(values), len(set(clusters))
    binary = all(value in {0.0, 1.0} for value in values)
    if (binary and n_clusters == len(values)) or error == 0:
        return wilson(mean * n_clusters, n_clusters)
    low, high = t_interval(mean, error, n_clusters)
    return max(0.0, low), min(1.0, high)
