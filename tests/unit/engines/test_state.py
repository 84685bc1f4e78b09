from __future__ import annotations

import itertools

import pytest

from evald.engines.state import ALLOWED, IllegalTransition, RestartPolicy, State, StateMachine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_whole_life() -> None:
    seen: list[State] = []
    clock = Clock()
    machine = StateMachine("e", on_change=seen.append, clock=clock)
    path = [
        State.STARTING, State.READY, State.PINNING, State.SERVING, State.DRAINING, State.PINNING,
        State.TAINTED, State.BACKOFF, State.STARTING, State.UNHEALTHY, State.QUARANTINED,
        State.STOPPED,
    ]  # fmt: skip
    for state in path:
        clock.now += 1.0
        assert machine.transition(state, f"now {state}")
        assert machine.detail == f"now {state}"
        assert machine.since == clock.now
    assert seen == path
    assert machine.generation == len(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(old, new) for old, new in itertools.product(State, State) if new not in ALLOWED[old]],
)
def test_everything_else_raises(old: State, new: State) -> None:
    machine = StateMachine("e")
    machine.state = old
    with pytest.raises(IllegalTransition, match=f"engine e: {old} -> {new}"):
        machine.transition(new)
    assert machine.state is old
    assert machine.generation == 0


def test_every_state_can_be_stopped_and_reached() -> None:
    assert all(State.STOPPED in ALLOWED[state] for state in State if state is not State.STOPPED)
    assert set().union(*ALLOWED.values()) == set(State)


def test_a_failed_update_never_serves() -> None:
    assert State.SERVING not in ALLOWED[State.TAINTED]
    assert State.READY not in ALLOWED[State.TAINTED]
    assert [old for old in State if State.SERVING in ALLOWED[old]] == [State.PINNING]


def test_a_stale_timer_is_ignored() -> None:
    machine = StateMachine("e")
    machine.transition(State.STARTING)
    timer = machine.generation
    assert machine.transition(State.READY)
    assert not machine.transition(State.UNHEALTHY, "start timeout", generation=timer)
    assert machine.state is State.READY
    assert machine.transition(State.UNHEALTHY, generation=machine.generation)


def policy(clock: Clock, rng: float = 0.5) -> RestartPolicy:
    return RestartPolicy(rng=lambda: rng, clock=clock)


def test_waits_double_and_the_fifth_restart_is_refused() -> None:
    clock = Clock()
    restarts = policy(clock)
    assert [restarts.next_wait_s(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]
    assert restarts.restarts == 5


def test_waits_end_at_a_minute() -> None:
    clock = Clock()
    restarts = policy(clock)
    waits = []
    for _ in range(12):
        waits.append(restarts.next_wait_s(0.0))
        clock.now += 500.0  # slow enough to stay out of quarantine
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0]


def test_jitter_is_ten_percent() -> None:
    assert policy(Clock(), rng=0.0).next_wait_s(0.0) == pytest.approx(0.9)
    assert policy(Clock(), rng=1.0).next_wait_s(0.0) == pytest.approx(1.1)


def test_ten_healthy_minutes_reset_the_wait_but_not_the_window() -> None:
    clock = Clock()
    restarts = policy(clock)
    restarts.next_wait_s(0.0)
    assert restarts.next_wait_s(599.0) == 2.0
    assert restarts.next_wait_s(600.0) == 1.0
    assert restarts.next_wait_s(0.0) == 2.0
    assert restarts.next_wait_s(600.0) is None


def test_restarts_leave_the_window_after_half_an_hour() -> None:
    clock = Clock()
    restarts = policy(clock)
    for _ in range(4):
        assert restarts.next_wait_s(0.0) is not None
    clock.now += 1800.0
    assert restarts.next_wait_s(0.0) is not None


def test_restarts_blamed_on_a_snapshot_neither_count_nor_wait() -> None:
    restarts = policy(Clock())
    assert [restarts.next_wait_s(0.0, blamed=True) for _ in range(20)] == [0.0] * 20
    assert restarts.restarts == 0
    assert restarts.next_wait_s(0.0) == 1.0
