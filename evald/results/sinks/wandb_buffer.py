"""evald's results in the trainer's own W&B run, without disturbing its steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from evald.errors import EvaldError
from evald.results.records import PointRecord, SetRecord, decode_any
from evald.results.sinks.rows import Row, Rows
from evald.results.sinks.wandb_values import Newest, define_metrics, values


class WandbBuffer:
    """Holds results back until the trainer commits a row of its own, which takes one along.

        evals_log = WandbBuffer(run)
        for step in ...:
            evals.poll(evals_log.add)
            run.log({"loss": loss, **evals_log.before_commit(step)}, step=step)
        evals_log.finish()

    A log call of its own would move W&B's counter, and W&B would drop what the trainer logs with a
    lower ``step=``; ``commit=False`` would merge two points into one row. So each commit of the
    trainer's takes one row, which is drawn at its own ``eval/step``. Calls with the same ``step=``
    are one commit. ``run``: what ``wandb.init`` returned. For one thread.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._rows: dict[str, Rows] = {}
        self._waiting: deque[Row] = deque()
        self._summary = Newest()
        #: the trainer's step that took the last row.
        self._taken_at: int | None = None
        define_metrics(run)

    def __len__(self) -> int:
        """Return how many rows wait for a commit."""
        return len(self._waiting)

    def add(self, record: dict[str, Any] | Row) -> None:
        """Take in a record (of ``EvalDispatcher.poll``), or a row (of ``follow``).

        What is neither a set's nor a point's is passed by. Raises EvaldError for what is no record.
        """
        if isinstance(record, Row):
            self._waiting.append(record)
            return
        try:
            decoded = decode_any(msgspec.json.encode(record))
        except (msgspec.DecodeError, TypeError) as error:
            raise EvaldError(f"cannot log a record: {error}; give it as poll() does") from error
        if isinstance(decoded, SetRecord | PointRecord):
            row = self._rows.setdefault(decoded.run, Rows()).take(decoded)
            if row is not None:
                self._waiting.append(row)

    def before_commit(self, step: int | None = None) -> dict[str, float]:
        """Return what the trainer's next log call takes along; empty when nothing waits.

        ``step``: the one that the call names, if it names one. Nothing is given to a second call
        with the same step, nor to one that W&B will drop because its counter is further.
        """
        if not self._waiting:
            return {}
        if step is not None:
            if step == self._taken_at or step < self._run.step:
                return {}
            self._taken_at = step
        row = self._waiting.popleft()
        self._summary.take(row)
        return values(row)

    def finish(self) -> None:
        """Log what still waits, one commit for each row; call it after the trainer's last one."""
        if self._waiting:
            self._run.log({})  # a commit with step= is open until the next one
        while data := self.before_commit():
            self._run.log(data)
        latest = self._summary.all()
        if latest:
            self._run.summary.update(latest)
