"""The interval of an aggregate, against closed forms and many simulated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evald.evals.stats.aggregate import combined_interval
from evald.evals.stats.errors import Z95, mean_error, share_interval, t_interval, wilson

RUNS = 2000


def test_oracle_of_normal_intervals_it_is_the_normal_interval() -> None:
    errors = [0.1, 0.3, 0.2]
    intervals = [(1.0 - Z95 * error, 1.0 + Z95 * error) for error in errors]
    error = math.sqrt(sum(one * one for one in errors)) / 3
    expected = 1.0 - Z95 * error, 1.0 + Z95 * error
    assert combined_interval([1 / 3] * 3, [1.0] * 3, intervals) == pytest.approx(expected)


def test_of_one_set_it_is_that_sets_own() -> None:
    assert combined_interval([1.0], [0.9], [wilson(9, 10)]) == pytest.approx(wilson(9, 10))


@pytest.mark.parametrize("right", [0, 1, 9, 10])
def test_of_scores_between_0_and_1_it_stays_there(right: int) -> None:
    interval = wilson(right, 10)
    low, high = combined_interval([0.7, 0.2, 0.1], [right / 10] * 3, [interval] * 3)
    assert 0 <= low <= right / 10 + 1e-12
    assert right / 10 - 1e-12 <= high <= 1
    assert interval[0] <= low < high <= interval[1]


@pytest.mark.parametrize("truths", [(0.95, 0.9, 0.97), (0.1, 0.5, 0.02)])
def test_oracle_simulation_coverage_of_right_or_wrong_sets(truths: tuple[float, ...]) -> None:
    draw = np.random.default_rng(11)
    sizes, shares = (40, 120, 200), (1 / 3, 1 / 3, 1 / 3)
    truth = sum(truths) / 3
    hits = 0
    for _ in range(RUNS):
        means, intervals = [], []
        for size, chance in zip(sizes, truths, strict=True):
            values = [float(v) for v in draw.random(size) < chance]
            means.append(sum(values) / size)
            error = mean_error(values, range(size))
            intervals.append(share_interval(values, range(size), error))
        low, high = combined_interval(shares, means, intervals)
        hits += low <= truth <= high
    assert 0.93 <= hits / RUNS <= 0.97


def test_oracle_simulation_coverage_of_few_questions() -> None:
    draw = np.random.default_rng(12)
    hits = 0
    for _ in range(RUNS):
        means, intervals = [], []
        for size in (6, 10):
            values = [float(v) for v in draw.normal(2.0, 1.0, size)]
            means.append(sum(values) / size)
            intervals.append(t_interval(means[-1], mean_error(values, range(size)), size))
        low, high = combined_interval([0.5, 0.5], means, intervals)
        hits += low <= 2.0 <= high
    # a normal interval would have 0.91
    assert 0.94 <= hits / RUNS <= 0.975
