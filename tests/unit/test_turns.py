"""The line for the engines, and whose turn it is to be started."""

from __future__ import annotations

from evald.point import PointKey
from evald.turns import RunsInTurn, Turns


def test_runs_take_turns_and_the_oldest_of_a_run_goes_first() -> None:
    queue = [PointKey("a", 0), PointKey("a", 1), PointKey("a", 2), PointKey("b", 7)]
    queue += [PointKey("b", 6), PointKey("c", 1)]
    runs, order = RunsInTurn(), []
    while queue:
        key = runs.choose(queue)
        queue.remove(key)
        runs.start(key.run)
        order.append((key.run, key.step))
    assert order == [("a", 0), ("b", 7), ("c", 1), ("a", 1), ("b", 6), ("a", 2)]


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


def test_who_shares_lets_the_next_one_go_on_beside_it() -> None:
    turns = Turns()
    first, second, third = (PointKey("r", step) for step in range(3))
    events = [turns.join(key) for key in (first, second, third)]
    turns.share(first)
    assert [e.is_set() for e in events] == [True, True, False]
    turns.leave(second)  # it ends before the one in front
    assert [e.is_set() for e in events] == [True, True, True]
    fourth = turns.join(PointKey("r", 3))
    assert not fourth.is_set()
    turns.leave(third)
    assert fourth.is_set()


def test_sharing_out_of_turn_calls_nobody_too_early() -> None:
    turns = Turns()
    events = [turns.join(PointKey("r", step)) for step in range(3)]
    turns.share(PointKey("r", 1))
    turns.share(PointKey("r", 9))  # it has left already
    assert [e.is_set() for e in events] == [True, False, False]
    turns.leave(PointKey("r", 0))
    assert [e.is_set() for e in events] == [True, True, True]
