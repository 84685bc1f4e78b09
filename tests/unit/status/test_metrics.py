"""What Prometheus sees: read back with the parsers of its own library."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse

from evald.point import Outcome, Timings
from evald.results.records import Alert, Counts, PointRecord, SetRecord
from evald.status.metrics import Metrics
from evald.status.view import DiskView, EngineView, PointView, SetView, StagingView, StatusView

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def view(**fields: Any) -> StatusView:
    standard: dict[str, Any] = {
        "version": "9.8",
        "pid": 1,
        "beat": 12,
        "time": 1000.0,
        "uptime_s": 100.0,
        "state": "serving",
        "run": "r",
        "results": "/r",
        "cap": 2,
        "last_seq": 34,
    }
    return StatusView(**standard | fields)


def point(step: int, outcome: Outcome = Outcome.OK, **fields: Any) -> PointRecord:
    return PointRecord(run="r", step=step, record_id=f"r/step/{step}/r0", outcome=outcome, **fields)


def series(metrics: Metrics) -> Series:
    page = metrics.exposition()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(page.decode())
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def test_points_are_counted_by_outcome_and_reason() -> None:
    metrics = Metrics(view)
    for record in (
        point(1),
        point(2, Outcome.PARTIAL),
        point(3, Outcome.SKIPPED, reason="busy"),
        point(4, Outcome.SKIPPED, reason="no_license"),
        point(5, Outcome.SKIPPED, reason='"}\nevil 1'),
    ):
        record.time = 50.0 + record.step
        metrics.note(record)
    found = series(metrics)
    assert value(found, "evald_points_total", outcome="ok", reason="") == 1
    assert value(found, "evald_points_total", outcome="partial", reason="") == 1
    assert value(found, "evald_points_total", outcome="skipped", reason="busy") == 1
    assert value(found, "evald_points_total", outcome="skipped", reason="other") == 2
    # there before it ever happens
    assert value(found, "evald_points_total", outcome="skipped", reason="deadline") == 0
    assert value(found, "evald_last_point_timestamp_seconds") == 55
    # what others name makes no series
    assert not any("evil" in str(labels) or "no_license" in str(labels) for _, labels in found)


def test_stages_are_histograms_of_measured_points() -> None:
    metrics = Metrics(view)
    metrics.note(point(1, timings=Timings(pin_s=3.0, evaluate_s=200.0, total_s=204.0)))
    metrics.note(point(2, Outcome.SKIPPED, reason="busy"))
    metrics.note(point(2, revision=1, provenance={"regraded_from": "r/step/1/r0"}))
    found = series(metrics)
    name = "evald_point_stage_duration_seconds"
    assert value(found, f"{name}_count", stage="pin") == 1
    assert value(found, f"{name}_sum", stage="evaluate") == 200
    assert value(found, f"{name}_bucket", stage="pin", le="2.5") == 0
    assert value(found, f"{name}_bucket", stage="pin", le="5.0") == 1
    assert value(found, f"{name}_bucket", stage="evaluate", le="300.0") == 1
    assert value(found, "evald_point_duration_seconds_sum") == 204
    assert value(found, "evald_point_duration_seconds_count") == 1


def test_samples_are_counted_once_also_those_of_points_that_were_graded_again() -> None:
    metrics = Metrics(view)
    counts = Counts(
        n_total=20, n_scored=14, n_truncated=3, n_no_answer=2, n_error=3, n_grader_error=2,
        n_timeout=1, n_moved=4,
    )  # fmt: skip
    metrics.note(
        SetRecord(run="r", step=1, record_id="s", set="a", counts=counts, seconds=1, metrics={})
    )
    metrics.note(point(1, counts=counts))
    metrics.note(point(1, revision=1, counts=counts, provenance={"regraded_from": "r/step/1/r0"}))
    found = series(metrics)
    results = {"scored": 14, "error": 3, "grader_error": 2, "timeout": 1}
    for result, number in results.items():
        assert value(found, "evald_samples_total", result=result) == number
    assert value(found, "evald_samples_truncated_total") == 3
    assert value(found, "evald_samples_no_answer_total") == 2
    assert value(found, "evald_samples_moved_total") == 4
    assert value(found, "evald_grader_errors_total") == 2


def test_alerts_have_bounded_names_and_what_cleared_is_none() -> None:
    metrics = Metrics(view)
    for number in range(300):
        metrics.note(Alert(run="r", step=0, record_id=f"{number}", name=f"n{number}", detail="d"))
    metrics.note(Alert(run="r", step=0, record_id="x", name="n1", detail="d", cleared=True))
    metrics.note(Alert(run="r", step=0, record_id="y", name="n1", detail="d"))
    found = {k: v for k, v in series(metrics).items() if k[0] == "evald_alerts_total"}
    assert len(found) == 101
    assert value(found, "evald_alerts_total", alert="n1") == 2
    assert value(found, "evald_alerts_total", alert="other") == 200


FULL = view(
    lag_steps=40,
    not_written="the disk is full",
    queued=[PointView(run="r", step=9, revision=0, kind="step", state="queued", since_s=1)],
    running=[
        PointView(
            run="r",
            step=8,
            revision=0,
            kind="step",
            state="evaluating",
            since_s=1,
            sets=[SetView(name="a", done=3, total=10), SetView(name="b", done=0, total=5)],
        )
    ],
    engines=[
        EngineView(
            name="e0", state="serving", restarts=2, in_flight=7, kv_use=0.5, waiting=1,
            answers=11, prompt_tokens=222, generated_tokens=3333,
        ),
        EngineView(name="e1", state="quarantined"),
    ],
    staging=StagingView(
        root="/s", used_bytes=5, free_bytes=6, snapshots=1, max_bytes=50, min_free_bytes=3
    ),
    disk=DiskView(results_free_bytes=70, results_total_bytes=100, samples_bytes=8),
)  # fmt: skip


def test_the_status_as_metrics() -> None:
    found = series(Metrics(lambda: FULL))
    for name, number in {
        "evald_points_queued": 1,
        "evald_points_running": 1,
        "evald_points_in_flight_limit": 2,
        "evald_running_samples": 15,
        "evald_running_samples_done": 3,
        "evald_lag_steps": 40,
        "evald_staging_used_bytes": 5,
        "evald_staging_free_bytes": 6,
        "evald_staging_budget_bytes": 50,
        "evald_staging_min_free_bytes": 3,
        "evald_staging_snapshots": 1,
        "evald_results_free_bytes": 70,
        "evald_results_size_bytes": 100,
        "evald_results_samples_bytes": 8,
        "evald_results_blocked": 1,
        "evald_records_total": 34,
        "evald_beats_total": 12,
    }.items():
        assert value(found, name) == number, name
    for name, figure in {
        "evald_engine_restarts_total": 2,
        "evald_engine_answers_total": 11,
        "evald_engine_prompt_tokens_total": 222,
        "evald_engine_generated_tokens_total": 3333,
        "evald_engine_requests_in_flight": 7,
        "evald_engine_requests_waiting": 1,
        "evald_engine_kv_used_ratio": 0.5,
    }.items():
        assert value(found, name, engine="e0") == figure, name
    state = "evald_engine_state"
    assert value(found, state, engine="e0", state="serving") == 1
    assert value(found, state, engine="e0", state="quarantined") == 0
    assert value(found, state, engine="e1", state="quarantined") == 1
    assert value(found, "evald_state", state="serving") == 1
    assert sum(v for (name, _), v in found.items() if name == "evald_state") == 1


def test_what_is_not_known_is_absent_not_zero() -> None:
    found = series(Metrics(view))
    names = {name for name, _ in found}
    assert not names & {"evald_lag_steps", "evald_staging_budget_bytes", "evald_results_free_bytes"}
    engines = series(Metrics(lambda: FULL))
    assert value(engines, "evald_engine_kv_used_ratio", engine="e1") is None


def test_names_and_help_are_as_prometheus_wants_them() -> None:
    families = list(parse(Metrics(lambda: FULL).exposition().decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation.endswith("."), family.name
        if family.name.startswith("evald_") and family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
