"""Errors, intervals and tests, against scipy and against many simulated runs."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from evald.evals.stats.errors import (
    mean_error,
    ratio_error,
    share_interval,
    t_interval,
    wilson,
    within_error,
)
from evald.evals.stats.paired import difference, mcnemar, t_test
from evald.evals.stats.student_t import critical, two_sided_p

RUNS = 2000


@pytest.mark.parametrize("df", [1, 2, 3, 7, 29, 200, 20_000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.3, 1.0, 2.5, 10.0, 60.0])
def test_oracle_scipy_student_t(t: float, df: int) -> None:
    assert two_sided_p(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-9)
    assert two_sided_p(-t, df) == two_sided_p(t, df)


@pytest.mark.parametrize("df", [1, 2, 5, 30, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_oracle_scipy_critical_t(confidence: float, df: int) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, df)
    assert critical(confidence, df) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (5, 5), (1, 30), (17, 30), (400, 1000)])
def test_oracle_scipy_wilson(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(0.95, "wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("up", "down"),
    [(0, 0), (0, 1), (1, 0), (3, 9), (50, 50), (900, 1100), (0, 2000), (24_000, 25_000)],
)
def test_oracle_scipy_mcnemar(up: int, down: int) -> None:
    expected = stats.binomtest(up, up + down).pvalue if up + down else 1.0
    assert mcnemar(up, down) == pytest.approx(expected, rel=1e-9)


def test_oracle_scipy_paired_t_test() -> None:
    draw = np.random.default_rng(1)
    old = draw.random(40)
    new = old + draw.normal(0.05, 0.1, 40)
    found = difference(list(new), list(old), range(40), binary=False)
    assert found is not None
    expected = stats.ttest_rel(new, old)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.stderr == pytest.approx(stats.sem(new - old))


def test_oracle_scipy_standard_error_of_independent_questions() -> None:
    values = list(np.random.default_rng(2).random(50))
    assert mean_error(values, range(50)) == pytest.approx(stats.sem(values))


def test_oracle_brute_force_clustered_error() -> None:
    draw = np.random.default_rng(3)
    clusters = [int(c) for c in draw.integers(0, 9, 60)]
    values = [float(v) for v in draw.random(60)]
    mean = statistics.fmean(values)
    # every pair of questions of one cluster, itself included
    total = math.fsum(
        (a - mean) * (b - mean)
        for a, one in zip(values, clusters, strict=True)
        for b, other in zip(values, clusters, strict=True)
        if one == other
    )
    n_clusters = len(set(clusters))
    expected = math.sqrt(total * n_clusters / (n_clusters - 1)) / 60
    assert mean_error(values, clusters) == pytest.approx(expected)


def test_a_ratio_of_equal_denominators_is_a_mean() -> None:
    values = list(np.random.default_rng(4).random(30))
    expected = mean_error(values, range(30)) / 7
    assert ratio_error(values, [7.0] * 30, range(30)) == pytest.approx(expected)


def covered(low: float, high: float, truth: float) -> bool:
    return low <= truth <= high


@pytest.mark.parametrize("truth", [0.3, 0.62])
def test_oracle_simulation_coverage_of_right_or_wrong(truth: float) -> None:
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(RUNS):
        values = [float(v) for v in draw.random(120) < truth]
        hits += covered(*share_interval(values, range(120), mean_error(values, range(120))), truth)
    assert 0.93 <= hits / RUNS <= 0.97


def test_oracle_simulation_coverage_of_many_samples_for_each_question() -> None:
    draw = np.random.default_rng(6)
    hits = 0
    for _ in range(RUNS):
        ease = draw.beta(1.2, 2.8, 60)
        values = [float(v) for v in draw.binomial(8, ease) / 8]
        hits += covered(*share_interval(values, range(60), mean_error(values, range(60))), 0.3)
    assert 0.93 <= hits / RUNS <= 0.97


def test_oracle_simulation_coverage_with_clusters() -> None:
    draw = np.random.default_rng(7)
    clusters = [q // 4 for q in range(160)]
    hits = naive = 0
    for _ in range(RUNS):
        shared = np.repeat(draw.normal(0, 1, 40), 4)
        values = [float(v) for v in 0.5 + shared + draw.normal(0, 1, 160)]
        mean = statistics.fmean(values)
        hits += covered(*t_interval(mean, mean_error(values, clusters), 40), 0.5)
        naive += covered(*t_interval(mean, mean_error(values, range(160)), 160), 0.5)
    assert 0.93 <= hits / RUNS <= 0.97
    assert naive / RUNS < 0.90  # what ignoring the clusters would have claimed


def test_oracle_simulation_coverage_of_a_ratio() -> None:
    draw = np.random.default_rng(8)
    hits = 0
    for _ in range(RUNS):
        tokens = draw.integers(50, 500, 80).astype(float)
        nll = tokens * (2.0 + draw.normal(0, 0.3, 80))
        error = ratio_error(list(nll), list(tokens), range(80))
        hits += covered(*t_interval(float(nll.sum() / tokens.sum()), error, 80), 2.0)
    assert 0.93 <= hits / RUNS <= 0.97


def test_oracle_simulation_paired_error_is_smaller_on_correlated_points() -> None:
    draw = np.random.default_rng(9)
    hits = 0
    for _ in range(RUNS):
        ease = draw.beta(0.8, 0.8, 100)
        old = [float(v) for v in draw.binomial(4, ease) / 4]
        new = [float(v) for v in draw.binomial(4, np.clip(ease + 0.03, 0, 1)) / 4]
        found = difference(new, old, range(100), binary=False)
        assert found is not None
        unpaired = math.hypot(mean_error(new, range(100)), mean_error(old, range(100)))
        assert found.stderr < unpaired
        truth = float(np.mean(np.clip(ease + 0.03, 0, 1) - ease))
        hits += covered(*t_interval(found.delta, found.stderr, 100), truth)
    assert hits / RUNS > 0.93


def test_oracle_simulation_a_detectable_difference_is_found_in_four_of_five_runs() -> None:
    draw = np.random.default_rng(10)
    error = 1 / math.sqrt(400)
    effect = (statistics.NormalDist().inv_cdf(0.975) + statistics.NormalDist().inv_cdf(0.8)) * error
    found = 0
    for _ in range(RUNS):
        values = draw.normal(effect, 1, 400)
        one = difference([float(v) for v in values], [0.0] * 400, range(400), binary=False)
        assert one is not None
        assert one.detectable == pytest.approx(effect, rel=0.2)
        assert one.p is not None
        found += one.p < 0.05
    assert 0.76 <= found / RUNS <= 0.84


def test_oracle_simulation_error_within_questions() -> None:
    draw = np.random.default_rng(11)
    ease = draw.beta(1, 1, 30)
    means, claims = [], []
    for _ in range(RUNS):
        samples = (draw.random((30, 6)) < ease[:, None]).astype(float)
        means.append(float(samples.mean()))
        claims.append(within_error([list(row) for row in samples]))
    assert statistics.fmean(claims) == pytest.approx(statistics.stdev(means), rel=0.05)


def test_no_difference_has_no_p_value_to_boast_of() -> None:
    assert t_test(0.0, 0.0, 5) is None
    same = difference([0.5, 0.5], [0.25, 0.25], range(2), binary=False)
    assert same is not None
    assert (same.delta, same.p, same.detectable) == (0.25, None, None)
    assert difference([1.0], [0.0], [0], binary=True) is None


def test_where_all_agree_the_interval_has_a_width() -> None:
    assert share_interval([1.0] * 4, range(4), 0.0) == pytest.approx(wilson(4, 4))
    assert share_interval([0.5] * 4, range(4), 0.0) == pytest.approx(wilson(2, 4))
