"""The line for the engines."""

from __future__ import annotations

from evald.point import PointKey
from evald.turns import Turns


def test_first_come_first_served() -> None:
    turns = Turns()
    events = [turns.join(PointKey("r", step)) for step in range(3)]
    assert [e.is_set() for e in events] == [True, False, False]
    turns.leave(PointKey("r", 0))
    assert [e.is_set() for e in events] == [True, True, False]


def test_leaving_from_the_middle_calls_nobody_too_early() -> None:
    turns = Turns()
    events = [turns.join(PointKey("r", step)) for step in range(3)]
    turns.leave(PointKey("r", 1))
    assert not events[2].is_set()
    turns.leave(PointKey("r", 0))
    assert events[2].is_set()
