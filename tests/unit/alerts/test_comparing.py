"""Rules on curves: what fires, what is noise, and what is over."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
from null_curves import NAME, curve

from evald.alerts.comparing import Comparing, Watched
from evald.alerts.verdict import Verdict
from evald.config_alerts import AlertRule
from evald.point import Kind, Outcome
from evald.results.records import Counts, PointRecord, SetRecord

AIME = Watched(metric="eval/aime", sign=-1, sets=["aime"])


def rule(watched: Watched = AIME, kind: Any = "drop", **fields: Any) -> Comparing:
    return Comparing(AlertRule(name="r", kind=kind, **fields), [watched])


def point(
    step: int, value: float, *, error: float | None = 0.02, run: str = "a", **fields: Any
) -> PointRecord:
    metrics = {"eval/aime": value} | fields.pop("more", {})
    if error is not None:
        metrics["eval/aime/stderr"] = error
    kind = fields.pop("kind", Kind.STEP)
    return PointRecord(
        run=run,
        step=step,
        kind=kind,
        record_id=f"{run}/{kind}/{step}",
        outcome=fields.pop("outcome", Outcome.OK),
        metrics=metrics,
        **fields,
    )


def story(one: Comparing, *records: PointRecord | SetRecord) -> list[bool | str | None]:
    """What the rule says of each point; "-": nothing."""
    told: list[bool | str | None] = []
    for record in records:
        verdicts = one.note(record)
        told.append(verdicts[0].holds if verdicts else "-")
    return told


def values(*of: float) -> list[PointRecord]:
    return [point(step, value) for step, value in enumerate(of, start=1)]


@pytest.mark.parametrize(
    ("against", "curve_", "told"),
    [
        ("previous", (0.5, 0.52, 0.49), ["-", False, False]),
        # 0.02 * sqrt(2) * 3.92 = 0.111
        ("previous", (0.5, 0.35, 0.35), ["-", True, False]),
        ("previous", (0.5, 0.40), ["-", None]),
        # a slow decline is seen against the best one
        ("previous", (0.7, 0.65, 0.6, 0.55, 0.5, 0.45), ["-", *[False] * 5]),
        ("best", (0.7, 0.65, 0.6, 0.55, 0.5, 0.45), ["-", False, None, True, True, True]),
        # it lasts, and is over when it is back
        ("best", (0.7, 0.4, 0.45, 0.68, 0.4), ["-", True, True, False, True]),
    ],
)
def test_curves(against: Any, curve_: tuple[float, ...], told: list[bool | str | None]) -> None:
    assert story(rule(against=against), *values(*curve_)) == told


def test_against_the_baseline() -> None:
    one = rule(against="baseline")
    assert story(one, point(1, 0.1), point(0, 0.5, kind=Kind.BASELINE)) == ["-", "-"]
    assert story(one, point(2, 0.3), point(3, 0.5)) == [True, False]
    verdict = one.note(point(4, 0.2))[0]
    assert verdict.subject == "eval/aime"
    assert verdict.lasts
    assert verdict.detail.startswith(
        "eval/aime at step 4 is worse than the baseline: 0.2 against 0.5, 5.4 half widths of the "
        "95 % interval of the difference (alert from 2.0)"
    )


def test_each_drop_against_the_point_before_is_a_subject_of_its_own() -> None:
    one = rule()
    one.note(point(1, 0.9))
    first, second = one.note(point(2, 0.6)), one.note(point(3, 0.3, revision=1))
    assert [v.subject for v in first + second] == ["eval/aime@2.r0", "eval/aime@3.r1"]
    assert not first[0].lasts
    assert (second[0].run, second[0].step, second[0].revision) == ("a", 3, 1)
    assert "the point before (step 2): 0.3 against 0.6" in second[0].detail


def test_the_paired_difference_counts_where_there_is_one() -> None:
    paired = {"eval/aime/delta_prev": -0.03, "eval/aime/delta_prev_p": 1e-6}
    assert story(rule(), point(1, 0.5), point(2, 0.47, more=paired)) == ["-", True]
    noise = {"eval/aime/delta_prev": -0.3, "eval/aime/delta_prev_p": 0.2}
    assert story(rule(), point(1, 0.5), point(2, 0.2, more=noise)) == ["-", False]
    # of the best one only where that is the point before
    assert story(
        rule(against="best"), point(1, 0.5), point(2, 0.5, error=0.001), point(3, 0.47, more=paired)
    ) == ["-", False, False]
    assert story(rule(against="best"), point(1, 0.5), point(2, 0.47, more=paired)) == ["-", True]


def test_a_smallest_drop_can_be_asked_for() -> None:
    paired = {"eval/aime/delta_prev": -0.03, "eval/aime/delta_prev_p": 1e-9}
    records = [point(1, 0.5), point(2, 0.47, more=paired)]
    assert story(rule(at_least=0.05), *records) == ["-", None]
    assert story(rule(at_least=0.03), *records) == ["-", True]
    assert story(rule(k=4), *records) == ["-", None]


def test_without_an_error_only_a_smallest_drop_can_tell() -> None:
    records = [point(1, 0.5, error=None), point(2, 0.1, error=None)]
    assert story(rule(), *records) == ["-", "-"]
    assert story(rule(at_least=0.2), *records) == ["-", True]


def test_where_more_is_worse() -> None:
    one = rule(Watched(metric="eval/aime", sign=1, sets=["aime"]), against="best")
    assert story(one, *values(2.0, 1.5, 1.9, 1.4)) == ["-", False, True, False]


def test_samples_without_a_score_are_not_a_drop() -> None:
    """40 % of the requests failed: the headline counts them 0, the model is no worse."""
    lost = {"eval/aime/score_low": 0.3, "eval/aime/score_high": 0.7}
    partial = point(2, 0.3, more=lost, outcome=Outcome.PARTIAL)
    assert story(rule(), point(1, 0.5), partial, point(3, 0.5)) == ["-", False, False]
    # nor is what is not complete the best
    high = point(2, 0.9, outcome=Outcome.PARTIAL)
    assert story(rule(against="best"), point(1, 0.5), high, point(3, 0.5)) == ["-", False, False]


def test_what_does_not_compare() -> None:
    one = rule(against="best")
    again = point(1, 0.1, revision=1, provenance={"regraded_from": "a/step/1"})
    skipped = PointRecord(run="a", step=3, record_id="x", outcome=Outcome.SKIPPED, reason="busy")
    other_run = point(4, 0.1, run="b")
    late = point(2, 0.1)
    broken = point(6, 0.1, curve_breaks=["aime"])
    other_break = point(8, 0.1, curve_breaks=["gpqa"])
    no_such = point(9, 0.1)
    del no_such.metrics["eval/aime"]
    told = story(
        one, point(1, 0.9), again, skipped, other_run, point(5, 0.1), late, broken, point(7, 0.1),
        other_break, no_such,
    )  # fmt: skip
    # the first point was graded again: it is 0.1 now, and 5 is no worse
    assert told == ["-", "-", "-", "-", False, "-", "-", False, False, "-"]


def test_a_point_that_ends_after_the_next_one_is_compared_with_the_one_before_it() -> None:
    told = story(rule(), point(1, 0.9), point(3, 0.9), point(2, 0.1), point(4, 0.1))
    assert told == ["-", False, True, True]


def test_a_paired_difference_counts_only_to_the_point_that_it_was_computed_to() -> None:
    """Step 2 ends between the set of step 3 and its record: the difference is to step 1."""
    paired = {"eval/aime/delta_prev": -0.3, "eval/aime/delta_prev_p": 1e-9}
    done = SetRecord(
        run="a", step=3, record_id="3/aime", set="aime", counts=Counts(n_total=100), seconds=1,
        metrics={},
    )  # fmt: skip
    third = point(3, 0.5, more=paired)
    assert story(rule(), point(1, 0.8), point(2, 0.5), done, third)[-1] is True
    assert story(rule(), point(1, 0.8), done, point(2, 0.5), third)[-1] is False


def test_grading_again_tells_nothing_but_is_compared_with() -> None:
    one = rule()
    again = point(2, 0.1, revision=1, provenance={"regraded_from": "a/step/2"})
    told = story(one, point(1, 0.9), point(2, 0.9), again, point(3, 0.1), point(4, 0.9))
    assert told == ["-", False, "-", False, False]


def share(step: int, ratio: float, n: int = 100, run: str = "a") -> list[Any]:
    common: dict[str, Any] = {"run": run, "step": step}
    return [
        SetRecord(
            **common, record_id=f"{step}/aime", set="aime", counts=Counts(n_total=n), seconds=1,
            metrics={},
        ),
        PointRecord(
            **common, record_id=f"{step}", outcome=Outcome.OK,
            metrics={"eval/aime-truncated_ratio": ratio},
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "n", "each", "told"),
    [
        ((0.0, 0.03), 100, 1, [False]),
        ((0.0, 0.09), 100, 1, [None]),
        ((0.0, 0.14), 100, 1, [True]),
        # 14 of 100, but of 12 questions
        ((0.0, 0.14), 100, 8, [False]),
        # certain, but too little to care
        ((0.0, 0.04), 10_000, 1, [None]),
        ((0.0, 0.06), 10_000, 1, [True]),
        ((0.5, 0.0), 100, 1, [False]),
    ],
)
def test_truncation(ratios: tuple[float, ...], n: int, each: int, told: list[bool | None]) -> None:
    watched = Watched(metric="eval/aime-truncated_ratio", sign=1, sets=["aime"], samples_each=each)
    one = rule(watched, kind="truncated")
    found: list[Verdict] = []
    for step, ratio in enumerate(ratios):
        for record in share(step, ratio, n):
            found += one.note(record)
    assert [verdict.holds for verdict in found] == told


def test_noise_does_not_fire_and_a_real_drop_does() -> None:
    """1,000 points of a model that does not change, and 25 real drops; k = 2 is 1 in 23,000."""
    rng = random.Random(7)  # noqa: S311 - a simulation
    watched = Watched(metric=NAME, sign=-1, sets=["sim"])

    def alarms(against: Any, k: float | None, **of: Any) -> list[int]:
        one = Comparing(AlertRule(name="r", kind="drop", against=against, k=k), [watched])
        return [
            record.step
            for record in curve(rng, questions=100, samples=1, **of)
            if any(verdict.holds for verdict in one.note(record))
        ]

    for against in ("previous", "best", "baseline"):
        assert sum(len(alarms(against, None, points=50)) for _ in range(7)) == 0
    # the scale is what it says: 1 in 40 for k = 1
    noisy = sum(len(alarms("previous", 1.0, points=50)) for _ in range(20))
    assert 0.005 < noisy / (20 * 49) < 0.04
    found = [alarms("baseline", None, points=8, fall_at=6, by=0.4) for _ in range(25)]
    assert sum(bool(steps) and steps[0] >= 6 for steps in found) >= 23


@pytest.mark.parametrize("against", ["previous", "best"])
def test_a_long_ledger_is_learnt_in_no_time(against: Any) -> None:
    """All of it is read on the event loop at each start: it must not grow with the square."""
    one = rule(against=against)
    begun = time.process_time()
    for record in values(*(0.3 + step / 100_000 for step in range(20_000))):
        one.note(record)
    assert time.process_time() - begun < 10
    [verdict] = one.note(point(20_001, 0.1))
    assert verdict.holds
    assert "(step 20000): 0.1 against 0.5" in verdict.detail


def test_a_best_point_that_is_graded_again_is_the_best_no_longer() -> None:
    one = rule(against="best")
    for record in values(0.5, 0.9, 0.6):
        one.note(record)
    again = msgspec.structs.replace(
        point(2, 0.4, revision=1), provenance={"regraded_from": "a/step/2/r0"}
    )
    one.note(again)
    [verdict] = one.note(point(4, 0.1))
    assert "(step 3): 0.1 against 0.6" in verdict.detail
    [verdict] = one.note(point(4, 0.2, revision=1))
    assert "(step 3): 0.2 against 0.6" in verdict.detail
