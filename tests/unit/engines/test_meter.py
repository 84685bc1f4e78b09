from __future__ import annotations

import pytest

from evald.engines.limit_search import Load
from evald.engines.meter import STALE_S, WINDOW_S, Meter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def load(rate: float | None = None) -> Load:
    return Load(running=4, waiting=2, token_usage=0.5, tokens_per_s=rate)


def shown(meter: Meter) -> tuple[float | None, Load | None]:
    return meter.tokens_per_s, meter.load


def test_nothing_is_known_of_an_engine_that_has_done_nothing() -> None:
    meter = Meter(Clock())
    assert meter.tokens_per_s is None
    assert meter.load is None


def test_the_rate_is_that_of_the_answers_that_came_lately() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.note_tokens(5000)  # nobody knows how long these took
    for _ in range(40):
        clock.now_s += 0.5
        meter.note_tokens(50)
    assert meter.tokens_per_s == pytest.approx(100, rel=0.05)
    for _ in range(60):
        clock.now_s += 0.5
        meter.note_tokens(100)
    assert meter.tokens_per_s == pytest.approx(200, rel=0.07)


def test_a_rate_is_not_told_from_a_moment_and_not_kept_for_ever() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.note_tokens(10)
    clock.now_s += 0.5
    meter.note_tokens(10)
    assert meter.tokens_per_s is None
    clock.now_s += 1.5
    assert meter.tokens_per_s == pytest.approx(5)
    clock.now_s += WINDOW_S + 1
    assert meter.tokens_per_s is None
    meter.note_tokens(1000)  # the first one again
    clock.now_s += 2
    assert meter.tokens_per_s is None


def test_until_answers_come_the_servers_own_rate_is_shown_while_it_is_fresh() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.note_load(load(rate=700.0))
    assert shown(meter) == (700, load(rate=700.0))
    clock.now_s += STALE_S + 0.1
    assert shown(meter) == (None, None)


def test_an_idle_engine_shows_nothing() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(4):
        meter.note_tokens(10)
        clock.now_s += 1
    meter.note_load(load(rate=None))
    assert None not in shown(meter)
    meter.clear()
    assert shown(meter) == (None, None)
