"""The points' part of the status: what runs, what queues, what came out lately."""

from __future__ import annotations

import re

from evald.point import Kind, Outcome
from evald.results.records import PointRecord, is_own_metric
from evald.status.terminal.numbers import change, duration, error, score
from evald.status.terminal.text import Line, Painter, Span
from evald.status.view import PointView, RegradeView, SetView, StatusView

#: columns of the cells of a set that runs, behind its name and its bar.
_DONE, _SCORE, _LEFT = 13, 7, 12
#: of the table of the last points: at least for a score with its error bar; for a difference.
_CELL, _CHANGE = 11, 8
_NAME = (8, 16)
_MAX_SKIPPED = 2
#: a difference that chance explains less often than that is marked; in standard errors.
_P, _STANDARD_ERRORS = 0.05, 1.96
#: ``eval/{set}-...``: what stands beside a set's headline.
_BESIDE = re.compile(r".+-(?:(?:avg|pass|maj)@\d+|pass\^\d+|truncated_ratio|none_reward_ratio)")


def running(view: StatusView, paint: Painter) -> list[Line]:
    """Points that are worked on, with a bar for each set."""
    title = f" ({len(view.running)} of {view.cap})"
    rows: list[Line] = [[paint.text("running", "bold"), paint.text(title, "dim")]]
    for point in view.running:
        rows.append(_point(point, paint))
        name = paint.name_width([one.name for one in point.sets], *_NAME)
        rows += [_progress(one, paint, name) for one in point.sets]
    regraded = [one for one in view.regrades if one.state == "running"]
    return rows + [_regrade(one, paint) for one in regraded]


def queued(view: StatusView, paint: Painter) -> list[Line]:
    """Points that wait."""
    title = paint.text(f" ({len(view.queued)})", "dim")
    return [[paint.text("queued", "bold"), title], *(_point(p, paint) for p in view.queued)]


def _point(point: PointView, paint: Painter) -> Line:
    label = f"{point.kind} {point.step}" + (f" r{point.revision}" if point.revision else "")
    run = paint.left(point.run, paint.name_width([point.run], 1, paint.columns - 40))
    state = "dim" if point.state == "queued" else "cyan"
    return [
        paint.text("  "),
        run,
        paint.text(f" {label:<14} "),
        paint.text(f"{point.state:<11}", state),
        paint.text(f" {duration(point.since_s)}"),
    ]


def _progress(one: SetView, paint: Painter, name: int) -> Line:
    share = one.done / one.total if one.total else 0.0
    bar = min(max(paint.columns - 4 - name - _DONE - _SCORE - _LEFT - 2, 10), 60)
    left = "" if one.left_s is None else f"{duration(one.left_s)} left"
    if one.total and one.done >= one.total:
        left = "done"
    return [
        paint.text("    "),
        paint.left(one.name, name),
        paint.text(" "),
        *paint.bar(share, bar),
        paint.right(f"{one.done}/{one.total}", _DONE),
        paint.right("" if one.score is None else score(one.score), _SCORE),
        paint.right(left, _LEFT, "dim"),
    ]


def _regrade(one: RegradeView, paint: Painter) -> Line:
    return [
        paint.text(
            f"regrade  run {one.run}: {one.points_done} of {one.points} points, and "
            f"{one.samples_done} of {one.samples} samples of the next one"
        )
    ]


def last(points: list[PointRecord], now: float, paint: Painter) -> list[Line]:
    """Return a table of the newest points: a row for each set, a column for each point.

    Scores have the half of their 95 % interval, and a mark where they differ from the point before
    by more than chance explains; the newest one's differences stand in columns of their own.
    """
    if not points:
        return []
    measured = [point for point in points if point.outcome is not Outcome.SKIPPED]
    rows = _table(measured, paint)
    newest_first = sorted(points, key=lambda point: -point.seq)
    skipped = [point for point in newest_first if point.outcome is Outcome.SKIPPED]
    for point in skipped[:_MAX_SKIPPED]:
        words = f"skipped {_step(point)} {point.reason}: {point.detail}"
        rows += paint.sentence(words, "yellow", indent=2, most=2)
    title = f" of run {points[-1].run}, the newest ended {_age(now, newest_first[0])}"
    return [[paint.text("last points", "bold"), paint.text(title, "dim")], *rows]


def _age(now: float, point: PointRecord) -> str:
    age = duration(max(now - point.time, 0.0))
    return "now" if age == "0s" else f"{age} ago"


def _table(points: list[PointRecord], paint: Painter) -> list[Line]:
    points = points[-(paint.columns // _CELL + 1) :]  # more are never shown
    names = list(dict.fromkeys(name for point in points for name in headlines(point)))
    if not names:
        return []
    name = paint.name_width(names, *_NAME)
    # digits are never cut; a mark's column stands behind each score
    widest = max(len(_score(point, one, paint)) for point in points for one in names)
    cell = max(widest + 1, _CELL) + 1
    n_columns = max(1, (paint.columns - 2 - name - 2 * _CHANGE - 1) // cell)
    points = points[-n_columns:]
    newest = points[-1]
    heads: Line = [paint.text(" " * (1 + name))]
    heads += [paint.right(_step(point), cell, "bold") for point in points]
    delta = paint.glyphs.delta
    changes = [paint.right(f"{delta} {word}", _CHANGE, "dim") for word in ("prev", "base")]
    rows = [[*heads, paint.text(" "), *changes]]
    outcomes = ["" if p.outcome is Outcome.OK else p.outcome.value for p in points]
    if any(outcomes):
        cells = [paint.right(outcome, cell, "yellow") for outcome in outcomes]
        rows.append([paint.text(" " * (1 + name)), *cells])
    for one in names:
        row: Line = [paint.text("  "), paint.left(one, name)]
        for point in points:
            row += [paint.right(_score(point, one, paint), cell - 1), _mark(point, one, paint)]
        for comparison in ("prev", "baseline"):
            value, style = _change(newest, one, comparison)
            row.append(paint.right("" if value is None else change(value), _CHANGE, style))
        rows.append(row)
    return rows


def _step(point: PointRecord) -> str:
    label = "baseline" if point.kind is Kind.BASELINE else str(point.step)
    return label + (f" r{point.revision}" if point.revision else "")


def _score(point: PointRecord, name: str, paint: Painter) -> str:
    """Return a score with its error bar; empty where the point has none."""
    value = point.metrics.get(f"eval/{name}")
    if value is None:
        return ""
    low, high = (point.metrics.get(f"eval/{name}/ci95_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return score(value)
    return f"{score(value)}{paint.glyphs.plus_minus}{error((high - low) / 2)}"


def _mark(point: PointRecord, name: str, paint: Painter) -> Span:
    """Return which way the score went since the point before, unless chance explains it."""
    delta, style = _change(point, name, "prev")
    if not style or not delta:
        return paint.text(" ")
    return paint.text(paint.glyphs.up if delta > 0 else paint.glyphs.down, style)


def _change(point: PointRecord, name: str, comparison: str) -> tuple[float | None, str]:
    """Return a difference, and its style: none where chance explains it."""
    key = f"eval/{name}/delta_{comparison}"
    delta = point.metrics.get(key)
    if not delta:
        return delta, ""
    p, spread = point.metrics.get(f"{key}_p"), point.metrics.get(f"{key}_stderr")
    by_error = spread is not None and abs(delta) > _STANDARD_ERRORS * spread
    if not (by_error if p is None else p < _P):
        return delta, ""
    lower_is_better = f"eval/{name}/perplexity" in point.metrics
    return delta, "green" if (delta > 0) is not lower_is_better else "red"


def headlines(record: PointRecord) -> dict[str, float]:
    """Return the headline of each eval set and aggregate, by name."""
    if record.outcome is Outcome.SKIPPED:
        return {}
    found = {}
    for key, value in record.metrics.items():
        name = key.removeprefix("eval/")
        beside = "/" in name or is_own_metric(name) or _BESIDE.fullmatch(name)
        if not beside:
            found[name] = value
    return found
