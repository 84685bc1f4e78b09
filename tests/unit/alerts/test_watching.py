"""Rules about the daemon itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evald.alerts.watching import Disk, Quarantined, Silent
from evald.config_alerts import AlertRule
from evald.point import Outcome
from evald.results.records import Accepted, PointRecord, RunEnd
from evald.status.view import DiskView, EngineView, StagingView, StatusView


def view(**fields: Any) -> StatusView:
    standard: dict[str, Any] = {
        "version": "1", "pid": 1, "beat": 1, "time": 0.0, "uptime_s": 1.0, "state": "serving",
        "run": "a", "results": "/r", "cap": 2,
    }  # fmt: skip
    return StatusView(**standard | fields)


def accepted(at_s: float, run: str = "a", step: int = 1) -> Accepted:
    return Accepted(
        run=run, step=step, record_id="x", directory="/d", size_bytes=1, fingerprint="f", time=at_s
    )


def ended(at_s: float, run: str = "a", step: int = 1) -> PointRecord:
    return PointRecord(run=run, step=step, record_id="y", outcome=Outcome.OK, time=at_s)


def silent() -> Silent:
    return Silent(AlertRule(name="s", kind="silent", after_s=600))


def holds(rule: Silent, now_s: float, *, uptime_s: float | None = None) -> bool | None:
    """``uptime_s`` None: since 1970."""
    [verdict] = rule.check(view(uptime_s=now_s if uptime_s is None else uptime_s), now_s)
    return verdict.holds


def test_silence_counts_from_the_last_terminal_record_of_a_run_that_goes_on() -> None:
    rule = silent()
    assert holds(rule, 10_000) is False  # nothing is expected
    rule.note(accepted(10_000))
    assert holds(rule, 10_600) is False
    assert holds(rule, 10_601) is True
    rule.note(ended(10_700))
    assert holds(rule, 11_300) is False
    assert holds(rule, 11_301) is True
    [verdict] = rule.check(
        view(engines=[EngineView(name="e", state="backoff")], uptime_s=11_900), 11_900
    )
    assert verdict.detail == (
        "no point has ended for 20 minutes, and run 'a' has not ended: 0 queued, 0 running, 0 of 1 "
        "engines serving; see `evald status`"
    )
    rule.note(RunEnd(run="b", step=1, record_id="z", points={}))
    assert holds(rule, 11_301) is True
    rule.note(RunEnd(run="a", step=1, record_id="z", points={}))
    assert holds(rule, 99_999) is False


def test_a_short_silence_is_said_in_seconds() -> None:
    rule = Silent(AlertRule(name="s", kind="silent", after_s=20))
    rule.note(accepted(10_000))
    [verdict] = rule.check(view(uptime_s=10_025), 10_025)
    assert verdict.detail.startswith("no point has ended for 25 s, and run 'a' has not ended")


def test_a_start_waits_before_it_complains_of_the_time_before() -> None:
    rule = silent()
    rule.note(ended(10_000))
    # not told, nor is it over
    assert holds(rule, 50_600, uptime_s=600) is None
    assert holds(rule, 50_601, uptime_s=601) is True


def test_a_new_run_after_a_long_pause_has_its_time() -> None:
    rule = silent()
    rule.note(ended(10_000))
    rule.note(RunEnd(run="a", step=1, record_id="z", points={}))
    rule.note(accepted(50_000, "b"))
    assert holds(rule, 50_001) is False
    assert holds(rule, 50_601) is True


def test_a_run_that_has_ended_is_not_begun_by_what_is_done_again() -> None:
    rule = silent()
    rule.note(ended(10_000))
    rule.note(RunEnd(run="a", step=1, record_id="z", points={}))
    again = msgspec.structs.replace(ended(10_100), revision=1)
    rule.note(msgspec.structs.replace(accepted(10_050), revision=1))
    rule.note(again)
    assert holds(rule, 20_000) is False
    rule.note(accepted(30_000, step=2))  # the job goes on after all
    assert holds(rule, 30_601) is True


def test_a_clock_that_is_set_is_no_silence() -> None:
    rule = silent()
    rule.note(accepted(10_000))
    assert holds(rule, 10_001, uptime_s=5000) is False
    assert holds(rule, 90_000, uptime_s=5001) is False
    assert holds(rule, 1_000, uptime_s=5600) is True
    assert holds(rule, 1_001, uptime_s=5601) is True


def test_quarantine_is_over_when_the_engine_works_again() -> None:
    rule = Quarantined(AlertRule(name="q", kind="quarantined"))

    def look(state: str) -> bool | None:
        engines = [
            EngineView(name="e0", state="serving"),
            EngineView(name="e1", state=state, detail="it died"),
        ]
        first, second = rule.check(view(engines=engines), 0)
        assert first.holds is False
        assert second.subject == "e1"
        return second.holds

    states = ("quarantined", "stopped", "starting", "backoff", "ready", "serving")
    assert [look(state) for state in states] == [True, None, None, None, False, False]
    [verdict] = rule.check(
        view(engines=[EngineView(name="e1", state="quarantined", detail="it died")]), 0
    )
    assert verdict.detail == (
        "engine e1 is quarantined: it died; repair the cause, then run `evald ctl release e1`"
    )


@pytest.mark.parametrize(
    ("fields", "free", "told"),
    [
        ({"below_bytes": 100}, 99, True),
        ({"below_bytes": 100}, 100, None),  # not over before there is a little more
        ({"below_bytes": 100}, 111, False),
        ({"below_share": 0.1}, 99, True),
        ({"below_share": 0.1, "below_bytes": 500}, 499, True),
        ({"below_share": 0.9, "below_bytes": 500}, 899, True),
    ],
)
def test_disk(fields: dict[str, Any], free: int, told: bool | None) -> None:
    rule = Disk(AlertRule(name="d", kind="disk", **fields))
    disk = DiskView(results_free_bytes=free, results_total_bytes=1000)
    [verdict] = rule.check(view(disk=disk), 0)
    assert (verdict.subject, verdict.holds) == ("results", told)


def test_disks_that_are_not_known_are_not_judged() -> None:
    def subjects(where: Any, **fields: Any) -> list[str]:
        rule = Disk(AlertRule(name="d", kind="disk", below_share=0.5, where=where))
        return [verdict.subject for verdict in rule.check(view(**fields), 0)]

    disk = DiskView(results_free_bytes=1, results_total_bytes=10)
    away = StagingView(root="/s", used_bytes=0, free_bytes=0, snapshots=0)
    there = StagingView(root="/s", used_bytes=0, free_bytes=1, total_bytes=10, snapshots=0)
    assert subjects(None) == []
    assert subjects(None, disk=disk, staging=away) == ["results"]
    assert subjects(None, disk=disk, staging=there) == ["results", "staging"]
    assert subjects("staging", disk=disk, staging=there) == ["staging"]
    assert subjects("results", disk=disk, staging=there) == ["results"]
