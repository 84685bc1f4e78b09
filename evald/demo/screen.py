"""How the demo is shown: a live table on a terminal, plain lines elsewhere, a chart at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from evald.demo.scene import Row, Scene

#: seconds between two plain lines about training.
_TRAINING_LINE_S = 15.0
#: rows of the chart for one unit of score.
_CHART_ROWS = 20
_COLUMN = 7


class Screen:
    """Shows a scene again and again: redrawn in place, or as lines of what changed."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._drawn = 0
        self._told: dict[str, str] = {}
        self._next_training_s = 0.0

    @property
    def unicode(self) -> bool:
        """Whether more than ASCII can be shown."""
        return (self._out.encoding or "ascii").lower().startswith("utf")

    def say(self, *lines: str) -> None:
        """Print lines that stay."""
        self._erase()
        for line in lines:
            self._out.write(line + "\n")
        self._out.flush()

    def show(self, scene: Scene, elapsed_s: float) -> None:
        """Show the scene as it is ``elapsed_s`` seconds after the start."""
        if self._live:
            self._redraw(live_lines(scene, elapsed_s))
        else:
            for line in self._changes(scene, elapsed_s):
                self._out.write(f"[{elapsed_s:5.0f} s] {line}\n")
            self._out.flush()

    def _redraw(self, lines: list[str]) -> None:
        columns, rows = shutil.get_terminal_size()
        # what does not fit would scroll and could never be drawn over
        lines = [line[: columns - 1] for line in lines[-(rows - 1) :]]
        self._erase()
        self._out.write("".join(line + "\n" for line in lines))
        self._out.flush()
        self._drawn = len(lines)

    def _erase(self) -> None:
        """Go back to where the table began and clear from there on."""
        if self._drawn:
            # from the first column on: the terminal may have echoed a ^C
            self._out.write(f"\r\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _changes(self, scene: Scene, elapsed_s: float) -> Iterator[str]:
        if elapsed_s >= self._next_training_s and scene.training.step:
            self._next_training_s = elapsed_s + _TRAINING_LINE_S
            yield _training(scene)
        for name, line in _engines(scene):
            if self._told.get(name) != line:
                self._told[name] = line
                yield line
        for row in scene.rows.values():
            if row.state and self._told.get(str(row.step)) != row.state:
                self._told[str(row.step)] = row.state
                yield f"step {row.step}: {_plain_state(row)}"


def _training(scene: Scene) -> str:
    training = scene.training
    if training.loss is None:
        return "trainer: starting"
    state = "has ended" if training.ended else "trains"
    return (
        f"trainer: {state}, step {training.step} of {scene.steps}, loss {training.loss:.3f}, "
        f"{training.seconds:.0f} s"
    )


def _engines(scene: Scene) -> Iterator[tuple[str, str]]:
    if scene.status is not None:
        for engine in scene.status.engines:
            version = f", weights {engine.weight_version}" if engine.weight_version else ""
            yield engine.name, f"engine {engine.name}: {engine.state}{version}"


def _plain_state(row: Row) -> str:
    if row.record is None:
        return row.state
    scores = " ".join(f"{name} {score:.2f}" for name, score in row.scores.items())
    mean = "" if row.mean is None else f", mean {row.mean:.3f} ({scores})"
    lag = "" if row.lag_steps is None else f", lag {row.lag_steps} steps"
    return f"{row.state}{mean}{lag}"


def live_lines(scene: Scene, elapsed_s: float) -> list[str]:
    """Return the live table, without any escape sequence."""
    status = scene.status
    daemon = "starting"
    if status is not None:
        daemon = f"{status.state}, {len(status.running)} running, {len(status.queued)} queued"
    return [
        f"{_training(scene)}    time: {duration(elapsed_s)}",
        f"evald: {daemon}",
        *(line for _, line in _engines(scene)),
        "",
        *table_lines(scene),
    ]


def table_lines(scene: Scene) -> list[str]:
    """Return one line for each snapshot, under a heading; fits into 80 columns."""
    widths = {name: max(len(name), 5) + 1 for name in scene.sets}
    heading = "".join(f"{name:>{width}}" for name, width in widths.items())
    lines = [
        f"{'step':>5}  {'state':<10} {'sets':>4}{heading} {'mean':>6} {'stderr':>6} {'lag':>5}"
    ]
    for row in scene.rows.values():
        done = f"{len(row.sets_done)}/{len(scene.sets)}" if row.published else ""
        scores = "".join(f"{_number(row.scores.get(n)):>{width}}" for n, width in widths.items())
        stderr = None if row.mean is None else row.stderr
        lag = "" if row.lag_steps is None else str(row.lag_steps)
        lines.append(
            f"{row.step:>5}  {row.state:<10} {done:>4}{scores} "
            f"{_number(row.mean):>6} {_number(stderr):>6} {lag:>5}".rstrip()
        )
    return lines


def chart_lines(scene: Scene, *, unicode: bool = True) -> list[str]:
    """Return the curve: mean over the sets against the step, bars of one standard error."""
    point, bar, axis, corner, line = "●│┤└─" if unicode else "o||+-"
    rows = [row for row in scene.rows.values() if row.mean is not None]
    if not rows:
        return ["(no point has a score)"]
    lines = ["mean score over the eval sets, held-out questions"]
    for level in range(_CHART_ROWS, -1, -1):
        label = f"{level / _CHART_ROWS:5.2f} {axis}" if level % 4 == 0 else f"      {axis}"
        cells = "".join(f"{_cell(row, level, point, bar):^{_COLUMN}}" for row in rows)
        lines.append((label + cells).rstrip())
    lines.append(f"      {corner}" + line * (_COLUMN * len(rows)))
    lines.append("       " + "".join(f"{row.step:^{_COLUMN}}" for row in rows).rstrip() + "  step")
    return lines


def _cell(row: Row, level: int, point: str, bar: str) -> str:
    mean = row.mean or 0.0
    if round(mean * _CHART_ROWS) == level:
        return point
    low, high = mean - row.stderr, mean + row.stderr
    return bar if round(low * _CHART_ROWS) <= level <= round(high * _CHART_ROWS) else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Return ``2 min 05 s``, or ``47 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
