import pytest
from structlog.testing import capture_logs

from evald.pulse import Pulse
from evald.status.watchdog import Watchdog, watchdog_s


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_loop_must_mark_progress_again_within_what_the_watchdog_allows(clock: Clock) -> None:
    pulse = Pulse("staging", clock=clock)
    pulse.beat()
    clock.now += 10
    assert pulse.overdue(10) == ""
    clock.now += 1
    assert pulse.overdue(10) == "staging: 'gets on' since 11 s"
    pulse.beat()
    assert pulse.overdue(10) == ""


def test_a_declared_wait_has_its_own_limit_or_none(clock: Clock) -> None:
    pulse = Pulse("engine-0", clock=clock)
    pulse.rest("starting", 1800)
    clock.now += 1800
    assert pulse.overdue(10) == ""
    clock.now += 1
    assert pulse.overdue(10) == "engine-0: 'starting' since 1801 s"
    pulse.rest("quarantined")
    clock.now += 1e9
    assert pulse.overdue(10) == ""


def test_nothing_is_expected_of_a_loop_that_has_not_begun(clock: Clock) -> None:
    pulse = Pulse("x", clock=clock)
    clock.now += 1e9
    assert pulse.overdue(10) == ""


def test_a_full_disk_excuses_all_and_then_each_has_its_time_again(clock: Clock) -> None:
    pulses = [Pulse("a", clock=clock), Pulse("b", clock=clock)]
    why = "the disk is full"
    dog = Watchdog(lambda: pulses, excuse=lambda: why, within_s=10)
    for pulse in pulses:
        pulse.beat()
    clock.now += 1000
    assert dog.stuck() == ""
    why = ""
    clock.now += 10
    assert dog.stuck() == ""
    clock.now += 1
    assert dog.stuck() == "a: 'gets on' since 11 s; b: 'gets on' since 11 s"


def test_who_stands_still_is_logged_once_and_so_is_that_it_goes_on(clock: Clock) -> None:
    pulse = Pulse("a", clock=clock)
    dog = Watchdog(lambda: [pulse], excuse=str, within_s=10)
    pulse.beat()
    clock.now += 11
    with capture_logs() as logs:
        dog.stuck()
        clock.now += 5
        assert dog.stuck()
        pulse.beat()
        assert dog.stuck() == ""
        dog.stuck()
    assert [(one["event"], one["log_level"]) for one in logs] == [
        ("loop_stuck", "error"),
        ("loop_goes_on", "info"),
    ]
    assert logs[0]["detail"] == "a: 'gets on' since 11 s"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "120000000"}, 120.0),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "7"}, 1.0),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_whether_systemd_watches(environ: dict[str, str], expected: float | None) -> None:
    assert watchdog_s(environ, 7) == expected
