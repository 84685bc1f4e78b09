import math

import pytest
from sink_cases import baseline, ended, run_end, set_done, skipped

from evald.results.records import AnyRecord
from evald.results.sinks.names import tag
from evald.results.sinks.rows import Row, Rows


def rows_of(*records: AnyRecord) -> list[Row]:
    rows = Rows()
    for seq, record in enumerate(records, start=1):
        record.seq = seq
    return [row for record in records if (row := rows.take(record)) is not None]


def metrics_of(*records: AnyRecord) -> list[dict[str, float]]:
    return [
        {name: None if math.isnan(value) else value for name, value in row.metrics.items()}  # type: ignore[misc] # NaN is equal to nothing
        for row in rows_of(*records)
    ]


def test_a_set_shows_early_and_the_point_adds_the_rest() -> None:
    early, late = rows_of(set_done(40, "a", 0.5), ended(40, a=0.5, b=0.25))
    assert (early.step, early.metrics, early.ended) == (40, {"eval/a": 0.5}, False)
    assert (late.step, late.metrics, late.ended) == (40, {"eval/b": 0.25}, True)
    assert (late.outcome, late.sets) == ("ok", ("a",))


def test_what_the_point_has_otherwise_is_shown_again() -> None:
    assert metrics_of(set_done(40, "a", 0.5), ended(40, a=0.75)) == [
        {"eval/a": 0.5},
        {"eval/a": 0.75},
    ]


def test_a_replay_shows_nothing_new() -> None:
    records: list[AnyRecord] = [set_done(40), ended(40, a=0.5)]
    assert len(rows_of(*records, *records)) == 2
    assert len(rows_of(ended(40), ended(40))) == 1


def test_a_point_without_metrics_is_still_ended() -> None:
    (row,) = rows_of(ended(40))
    assert (row.ended, row.metrics) == (True, {})


def test_what_a_skipped_point_showed_early_stands_no_longer() -> None:
    assert metrics_of(set_done(40, "a"), skipped(40, "crashed", void=("a",))) == [
        {"eval/a": 0.5},
        {"eval/a": None, "eval/skipped_crashed": 1},
    ]


def test_a_new_revision_takes_the_place_of_the_old_one() -> None:
    rows = rows_of(ended(40, a=0.5, b=1, c=2), ended(40, 1, a=0.75, b=1))
    assert rows[1].revision == 1
    assert rows[1].metrics.keys() == {"eval/a", "eval/c"}
    assert rows[1].metrics["eval/a"] == 0.75
    assert math.isnan(rows[1].metrics["eval/c"])


def test_a_skipped_revision_leaves_what_was_measured() -> None:
    assert metrics_of(
        ended(40, a=0.5),
        set_done(40, "a", 0.9, revision=1),
        set_done(40, "b", 0.8, revision=1),
        skipped(40, "deadline", revision=1, void=("a", "b")),
    )[3] == {"eval/a": 0.5, "eval/b": None, "eval/skipped_deadline": 1}


def test_a_measured_revision_ends_a_skip() -> None:
    assert metrics_of(skipped(40), ended(40, 1, a=0.5))[1] == {
        "eval/a": 0.5,
        "eval/skipped_busy": None,
    }


def test_records_of_an_older_revision_come_too_late() -> None:
    assert len(rows_of(ended(40, 1, a=0.5), set_done(40), ended(40, 0, a=0.1))) == 1


def test_a_set_record_after_the_end_shows_nothing() -> None:
    assert len(rows_of(ended(40, a=0.5), set_done(40, "a", 0.9))) == 1


def test_the_baseline_is_not_the_step_of_its_number() -> None:
    assert len(rows_of(baseline(a=0.1), ended(0, a=0.1))) == 2


def test_a_point_knows_the_measured_one_before_it() -> None:
    rows = rows_of(
        baseline(a=0.1), skipped(10), ended(30, a=0.3), ended(20, a=0.2), ended(40, a=0.4)
    )
    assert [row.previous for row in rows] == [
        "",
        "demo/baseline/0/r0",
        "demo/baseline/0/r0",
        "demo/baseline/0/r0",
        "demo/step/30/r0",
    ]


def test_other_records_show_nothing() -> None:
    assert rows_of(run_end()) == []


@pytest.mark.parametrize(
    "name",
    ["eval/aime", "eval/a.b_c@d+e-pass@8", "eval/x-pass^4", "eval/skipped_busy", "eval/größe"],
)
def test_good_names_stay(name: str) -> None:
    assert tag(name) == name


@pytest.mark.parametrize(
    "name", ["eval/a\nb", "eval/\x1b[31m", 'eval/"', "_step", "", "eval/" + "x" * 500, "a\\b", "/"]
)
def test_other_names_become_tags_and_stay_apart(name: str) -> None:
    made = tag(name)
    assert made.isprintable()
    assert 0 < len(made) <= 250
    assert made.startswith(("eval/", "a_b"))
    assert not set(made) & set('"\\')
    assert made != tag(name + "\n")
