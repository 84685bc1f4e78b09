"""How far beyond noise a difference is."""

from __future__ import annotations

import math

import pytest

from evald.alerts.noise import Reading, chance, independent, paired, widened, widths
from evald.evals.stats.errors import wilson


def test_widths_and_chances_are_one_scale() -> None:
    assert chance(1.0) == pytest.approx(0.025)
    assert chance(2.0) == pytest.approx(1 / 22_600, rel=0.01)
    for k in (0.5, 1.0, 2.0, 4.0):
        assert widths(chance(k)) == pytest.approx(k, rel=1e-3)
    assert widths(0.5) == widths(0.9) == 0
    assert widths(0.0) == math.inf


def test_the_best_of_many_needs_more() -> None:
    assert widened(2.0, 1) == widened(2.0, 0) == pytest.approx(2.0)
    assert chance(widened(2.0, 100)) == pytest.approx(chance(2.0) / 100)


@pytest.mark.parametrize(
    ("metrics", "worse_by", "k"),
    [
        ({}, None, None),
        ({"d": 0.1, "d_p": 1e-9}, -0.1, 0),  # better
        ({"d": 0.0, "d_p": 1.0}, 0, 0),
        ({"d": -0.1, "d_p": 0.05}, 0.1, 1),
        ({"d": -0.1, "d_p": 2 * chance(3.0)}, 0.1, 3),
        ({"d": -0.1, "d_p": 0.0}, 0.1, math.inf),
        # an aggregate has no p
        ({"d": -0.1, "d_stderr": 0.1 / 1.96}, 0.1, 1),
        # all questions fell by the same: three coins, or thirty
        ({"d": -1.0, "d_stderr": 0.0, "d_down": 3}, 1, widths(1 / 8)),
        ({"d": -1.0, "d_stderr": 0.0, "d_down": 30}, 1, widths(0.5**30)),
        ({"d": -1.0}, 1, 0),
    ],
)
def test_paired(metrics: dict[str, float], worse_by: float | None, k: float | None) -> None:
    found = paired(metrics, "d", sign=-1)
    if worse_by is None or k is None:
        assert found is None
    else:
        assert found == pytest.approx((worse_by, k), abs=1e-3)
        # where more is worse all is the other way round
        turned = {name: -v if name == "d" else v for name, v in metrics.items()}
        if "d_down" in turned:
            turned["d_up"] = turned.pop("d_down")
        assert paired(turned, "d", sign=1) == pytest.approx(found)


def share(n_right: int, n: int) -> Reading:
    low, high = wilson(n_right, n)
    return Reading(step=1, value=n_right / n, low=low, high=high)


def test_independent_values_with_their_intervals() -> None:
    old = Reading(step=1, value=0.6, low=0.5, high=0.9)
    new = Reading(step=2, value=0.3, low=0.0, high=0.4)
    # down: old's lower half and new's upper one
    assert independent(new, old, sign=-1) == pytest.approx((0.3, 0.3 / math.hypot(0.1, 0.1)))
    assert independent(new, old, sign=1) == pytest.approx((-0.3, 0))
    worse_by, k = independent(old, new, sign=1)
    assert worse_by == pytest.approx(0.3)
    assert k == pytest.approx(0.3 / math.hypot(0.1, 0.1))
    assert independent(Reading(step=3, value=0.0), old, sign=-1) == (0.6, None)


@pytest.mark.parametrize(("before", "after", "n"), [(0, 13, 100), (20, 54, 100), (1, 20, 200)])
def test_rises_of_shares_are_judged_like_an_exact_test(before: int, after: int, n: int) -> None:
    """The chance that this k stands for is Fisher's, within a factor of 4."""
    _, k = independent(share(after, n), share(before, n), sign=1)
    assert k is not None
    both = before + after
    tail = sum(
        math.comb(n, x) * math.comb(n, both - x) for x in range(after, min(both, n) + 1)
    ) / math.comb(2 * n, both)
    assert 1 / 4 < chance(k) / tail < 4
