from __future__ import annotations

import pytest

from evald.evals.pace import LATEST, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def pace_of(clock: Clock, count: int, each_s: float) -> Pace:
    pace = Pace(clock)
    for _ in range(count):
        pace.note()
        clock.now_s += each_s
    return pace


def test_too_few_samples_and_too_little_time_tell_nothing() -> None:
    clock = Clock()
    assert Pace(clock).left_s(10) is None
    assert pace_of(clock, 7, 5.0).left_s(10) is None
    assert pace_of(clock, 400, 0.001).left_s(10) is None


def test_what_is_left_takes_as_long_as_the_latest_took() -> None:
    clock = Clock()
    pace = pace_of(clock, 101, 0.5)
    assert pace.left_s(40) == pytest.approx(20, rel=0.02)
    for _ in range(LATEST + 1):  # twice as fast: the old ones are forgotten
        clock.now_s += 0.25
        pace.note()
    assert pace.left_s(40) == pytest.approx(10, rel=0.02)


def test_a_standstill_makes_the_rest_longer_and_an_end_leaves_nothing() -> None:
    clock = Clock()
    pace = pace_of(clock, 21, 1.0)
    before = pace.left_s(5)
    clock.now_s += 60
    after = pace.left_s(5)
    assert before is not None
    assert after is not None
    assert after > 3 * before
    assert pace.left_s(0) == 0
