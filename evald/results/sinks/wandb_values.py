"""What a W&B run shows of rows, whoever commits them."""

from __future__ import annotations

from typing import Any

from evald.results.sinks.names import tag
from evald.results.sinks.rows import STEP, Row

REVISION = "eval/revision"


class Newest:
    """The values of each metric at the highest step: what a summary should show."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, float]] = {}

    def take(self, row: Row) -> None:
        """Note what a row shows."""
        for name, value in values(row).items():
            if name not in self._values or self._values[name][0] <= row.step:
                self._values[name] = (row.step, value)

    def all(self) -> dict[str, float]:
        """Return the newest value of everything."""
        return {name: value for name, (_, value) in self._values.items()}

    def over(self, row: Row) -> dict[str, float]:
        """Return what a summary must show again after a row that came late; empty: it was not."""
        names = values(row).keys() & self._values.keys()
        return {name: v for name in names for step, v in [self._values[name]] if step > row.step}


def values(row: Row) -> dict[str, float]:
    """Return what a row logs: its metrics, its ``eval/step``, and which revision it is if not 0."""
    data: dict[str, float] = {tag(name): value for name, value in row.metrics.items()}
    data[STEP] = row.step
    if row.revision:
        data[REVISION] = row.revision
    return data


def define_metrics(run: Any) -> None:
    """Let W&B draw ``eval/...`` over ``eval/step``, in whatever order it comes."""
    for name in (STEP, REVISION):
        run.define_metric(name, hidden=True)
    run.define_metric("eval/*", step_metric=STEP)
