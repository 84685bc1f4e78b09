"""The node's part of the status: the daemon, its engines, its disks, what a person should know."""

from __future__ import annotations

from collections.abc import Sequence

from evald.results.records import Alert
from evald.status.terminal.numbers import duration, rate, size
from evald.status.terminal.text import Line, Painter
from evald.status.view import EngineView, StatusView

_STATES = {
    "serving": "green",
    "ready": "green",
    "quarantined": "red",
    "unhealthy": "red",
    "tainted": "red",
    "paused": "yellow",
    "backoff": "yellow",
}
#: nothing has to be said about these.
_WELL = frozenset({"serving", "ready", "draining", "pinning"})
#: free share of a disk below which it is coloured, and how.
_TIGHT = ((0.05, "red"), (0.15, "yellow"))
#: columns of an engine's cells, behind its name.
_STATE, _WEIGHTS = 11, 15
_CELLS = {"in flight": 9, "tok/s": 7, "KV": 4, "wait": 4, "restarts": 8}
#: where columns are few, these go, the first one first.
_GIVE_WAY = ("KV", "wait", "restarts", "tok/s", "in flight")
#: with the gaps.
_LEFT = _STATE + _WEIGHTS + 4
_ROW = _LEFT + sum(_CELLS.values()) + len(_CELLS)
#: rows for a sentence; and alerts, which are told for a day.
_MAX_ROWS, _MAX_ALERTS, _ALERT_S = 4, 3, 86_400.0
_VERSION_PARTS = 4


def heading(view: StatusView, paint: Painter) -> list[Line]:
    """Who it is, how it is, and why it does not evaluate."""
    lag = f"  {view.lag_steps} steps behind" if view.lag_steps else ""
    first = [
        paint.text(f"evald {view.version}  "),
        paint.text(view.state, _STATES.get(view.state, "cyan")),
        paint.text(f"  run {view.run}  pid {view.pid}  up {duration(view.uptime_s)}{lag}"),
    ]
    paused = f"PAUSED: {view.not_written}" if view.not_written else ""
    config = f"CONFIG: {view.config_fault}" if view.config_fault else ""
    return [
        first,
        *paint.sentence(paused, "red", most=_MAX_ROWS),
        *paint.sentence(config, "yellow", most=_MAX_ROWS),
    ]


def engines(view: StatusView, paint: Painter, *, brief: bool) -> list[Line]:
    """One row for each engine, under a heading; trouble in words below it.

    ``brief``: in few words, and those with trouble first.
    """
    if not view.engines:
        return [[paint.text("engines", "bold"), paint.text("  none")]]
    spare = paint.columns - _ROW
    name = paint.name_width([engine.name for engine in view.engines], 5, max(spare, 8))
    weights = _WEIGHTS + max(0, min(spare - name, 30))
    cells = _fitting(paint.columns - name - _LEFT)
    head: Line = [paint.left("engines", name + 3, "bold")]
    head += [paint.left("state", _STATE + 1, "dim"), paint.left("weights", weights, "dim")]
    rows = [[*head, *(paint.right(cell, _CELLS[cell] + 1, "dim") for cell in cells)]]
    shown = view.engines
    if brief:
        shown = sorted(shown, key=lambda engine: engine.state in _WELL)
    for engine in shown:
        rows.append(_engine(engine, paint, name, weights, cells))
        if engine.detail and engine.state not in _WELL:
            style, most = _STATES.get(engine.state, ""), 1 if brief else _MAX_ROWS
            rows += paint.sentence(engine.detail, style, indent=4, most=most)
    return rows


def _fitting(columns: int) -> list[str]:
    """Name the cells that there is room for."""
    cells = list(_CELLS)
    for cell in _GIVE_WAY:
        if sum(_CELLS[one] + 1 for one in cells) > columns:
            cells.remove(cell)
    return cells


def _engine(
    engine: EngineView, paint: Painter, name: int, weights: int, cells: Sequence[str]
) -> Line:
    kv_use = "-" if engine.kv_use is None else f"{engine.kv_use:.0%}"
    full = engine.kv_use is not None and engine.kv_use >= 0.95  # noqa: PLR2004 - where it throws out
    waiting = "-" if engine.waiting is None else str(engine.waiting)
    values = {
        "in flight": (str(engine.in_flight), ""),
        "tok/s": (rate(engine.tokens_per_s), ""),
        "KV": (kv_use, "yellow" if full else ""),
        "wait": (waiting, "" if engine.waiting else "dim"),
        "restarts": (str(engine.restarts), "yellow" if engine.restarts else "dim"),
    }
    return [
        paint.text("  "),
        paint.left(engine.name, name),
        paint.text(" "),
        paint.left(engine.state, _STATE, _STATES.get(engine.state, "cyan")),
        paint.text(" "),
        paint.left(_version(engine.weight_version, weights), weights),
        *(paint.right(values[cell][0], _CELLS[cell] + 1, values[cell][1]) for cell in cells),
    ]


def _version(version: str | None, columns: int) -> str:
    """Return a weight version; where it is too long, its step and digest."""
    if version is None:
        return "-"
    parts = version.rsplit(":", _VERSION_PARTS - 1)
    if len(version) > columns and len(parts) == _VERSION_PARTS:
        return f"{parts[1]}:{parts[2]}"
    return version


def alerts(told: list[Alert], now: float, paint: Painter) -> list[Line]:
    """Tell the newest alerts of the last day; ``now``: on the daemon's clock, as their times."""
    fresh = [alert for alert in told if now - alert.time < _ALERT_S][-_MAX_ALERTS:]
    if not fresh:
        return []
    rows: list[Line] = [[paint.text("alerts", "bold")]]
    for alert in reversed(fresh):
        age = duration(max(now - alert.time, 0.0))
        said = paint.sentence(f"{alert.name}: {alert.detail}", "yellow", indent=10, most=2)
        rows.append([paint.right(age, 8), paint.text(said[0][0].text[8:], "yellow")])
        rows += said[1:]
    return rows


def room(view: StatusView, paint: Painter) -> list[Line]:
    """Where snapshots and results lie, and how much room is left."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in view.ended.items())
    rows: list[Line] = [[paint.text("ended", "bold"), paint.text(f"    {counts or 'none'}")]]
    if (disk := view.disk) is not None:
        share = disk.results_free_bytes / max(disk.results_total_bytes, 1)
        style = next((style for least, style in _TIGHT if share < least), "")
        free = f"{size(disk.results_free_bytes)} of {size(disk.results_total_bytes)} free"
        line = [paint.text("disk", "bold"), paint.text(f"     {free}", style)]
        if disk.samples_bytes is not None:
            line.append(paint.text(f", samples {size(disk.samples_bytes)}"))
        rows.append(line)
    if (staging := view.staging) is not None:
        known = f"{staging.snapshots} snapshots, {size(staging.used_bytes)} used, "
        rows.append([
            paint.text("staging", "bold"),
            paint.text(f"  {staging.root}: {known}{size(staging.free_bytes)} free"),
        ])  # fmt: skip
    results = f"  {view.results} (seq {view.last_seq})"
    rows.append([paint.text("results", "bold"), paint.text(results)])
    if view.listen is not None:
        rows.append([
            paint.text("listens", "bold"), paint.text(f"  {view.listen} (with its token)")
        ])  # fmt: skip
    return rows
