"""A daemon's status and its last points, for tests of what a terminal shows."""

from __future__ import annotations

from typing import Any

from evald.point import Kind, Outcome
from evald.results.records import Alert, PointRecord
from evald.status.terminal.layout import lines
from evald.status.terminal.source import Shown
from evald.status.terminal.text import UNICODE, Glyphs, Painter, draw
from evald.status.view import (
    DiskView,
    EngineView,
    PointView,
    RegradeView,
    SetView,
    StagingView,
    StatusView,
)

NOW = 1_000_000.0
GIB = 1 << 30


def a_view(**changes: Any) -> StatusView:
    """Two engines, one of them broken; a point runs, and one queues."""
    fields: dict[str, Any] = {
        "version": "0.1",
        "pid": 42,
        "beat": 7,
        "time": NOW,
        "uptime_s": 3725.0,
        "state": "serving",
        "run": "demo",
        "results": "/results/results.jsonl",
        "cap": 2,
        "queued": [
            PointView(run="demo", step=80, revision=1, kind="step", state="queued", since_s=75)
        ],
        "running": [
            PointView(
                run="demo",
                step=40,
                revision=0,
                kind="step",
                state="evaluating",
                since_s=12.0,
                sets=[
                    SetView(name="copy", done=100, total=100, score=0.25, left_s=0.0),
                    SetView(name="sort", done=50, total=200, score=1.0, left_s=65.4),
                    SetView(name="add", done=0, total=0),
                ],
            )
        ],
        "ended": {"ok": 3, "partial": 0, "skipped": 1},
        "engines": [
            EngineView(
                name="engine-0",
                state="serving",
                weight_version="demo:40:abcdef01:x9",
                in_flight=8,
                restarts=2,
                tokens_per_s=812.4,
                kv_use=0.43,
                waiting=3,
            ),
            EngineView(name="engine-1", state="quarantined", detail="out of memory " * 12),
        ],
        "staging": StagingView(
            root="/staging", used_bytes=3 << 20, free_bytes=5 << 40, snapshots=2
        ),
        "disk": DiskView(
            results_free_bytes=GIB, results_total_bytes=100 * GIB, samples_bytes=5 * GIB
        ),
        "lag_steps": 40,
        "regrades": [
            RegradeView(ticket="a", run="demo", state="done", points=9),
            RegradeView(
                ticket="b", run="demo", points=7, points_done=2, samples=40, samples_done=30
            ),
        ],
        "last_seq": 9,
    }
    return StatusView(**fields | changes)


def a_point(step: int, scores: dict[str, float], **fields: Any) -> PointRecord:
    """A point that ended ``100 - step`` seconds ago, with intervals of 0.04."""
    metrics: dict[str, float] = {"eval/step": step, "eval/lag_steps": 0}
    for name, value in scores.items():
        metrics |= {
            f"eval/{name}": value,
            f"eval/{name}-pass@4": 1.0,
            f"eval/{name}-truncated_ratio": 0.0,
            f"eval/{name}/ci95_low": value - 0.02,
            f"eval/{name}/ci95_high": value + 0.02,
        }
    defaults: dict[str, Any] = {
        "run": "demo",
        "step": step,
        "seq": step,
        "time": NOW - 100 + step,
        "record_id": f"demo/step/{step}/r0",
        "outcome": Outcome.OK,
        "kind": Kind.STEP,
    }
    changed = fields.pop("metrics", {})
    return PointRecord(metrics=metrics | changed, **defaults | fields)


def some_points() -> list[PointRecord]:
    """Three that were measured, of which the last rose in one set, and one that was skipped."""
    rose = {
        "eval/copy/delta_prev": 0.1,
        "eval/copy/delta_prev_p": 0.001,
        "eval/copy/delta_baseline": 0.25,
        "eval/copy/delta_baseline_p": 0.001,
        "eval/sort/delta_prev": -0.01,
        "eval/sort/delta_prev_p": 0.6,
    }
    return [
        a_point(0, {"copy": 0.1, "sort": 0.5}, kind=Kind.BASELINE, record_id="demo/baseline/0/r0"),
        a_point(10, {"copy": 0.25, "sort": 0.51}, outcome=Outcome.PARTIAL),
        a_point(20, {}, outcome=Outcome.SKIPPED, reason="busy", detail="2 points are in flight"),
        a_point(30, {"copy": 0.35, "sort": 0.5}, metrics=rose),
    ]


def an_alert(age_s: float = 600.0, **fields: Any) -> Alert:
    """An alert that is ten minutes old."""
    defaults = {"run": "demo", "step": 0, "record_id": "demo/alert/x", "name": "disk"}
    said: dict[str, Any] = defaults | {"time": NOW - age_s, "detail": "it is nearly full"} | fields
    return Alert(**said)


def rows_of(
    shown: Shown,
    *,
    columns: int = 80,
    rows: int | None = None,
    glyphs: Glyphs = UNICODE,
    colour: bool = False,
) -> list[str]:
    """What a terminal of that size shows."""
    paint = Painter(columns, glyphs)
    return [draw(one, columns, glyphs, colour=colour) for one in lines(shown, paint, rows=rows)]
