"""What the demo knows: put together from the trainer's log, evald's status and the ledger.

The ledger is the truth about results; status only says what is going on until a record is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from evald.demo.layout import Layout
from evald.point import Kind, Outcome
from evald.results.follow import Follower, decode_lines
from evald.results.records import Newer, PointRecord, Record, SetRecord
from evald.status.view import PointView, StatusView


@dataclass
class Row:
    """One snapshot of the demo and its point."""

    step: int
    #: "" before its turn, "training", "published", a state of evald's status, or the outcome.
    state: str = ""
    published: bool = False
    #: by set, of sets that are done; live ones while they run.
    scores: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    sets_done: set[str] = field(default_factory=set)
    record: PointRecord | None = None
    #: newest snapshot's step minus this one; None until there is something to lag behind.
    lag_steps: int | None = None

    @property
    def mean(self) -> float | None:
        """Mean over the sets; None until the point has its record."""
        if self.record is None or not self.scores:
            return None
        return sum(self.scores.values()) / len(self.scores)

    @property
    def stderr(self) -> float:
        """Standard error of that mean (the sets are independent)."""
        if not self.scores:
            return 0.0
        return math.sqrt(sum(value**2 for value in self.stderrs.values())) / len(self.scores)


@dataclass
class Training:
    """How far the trainer is."""

    step: int = 0
    loss: float | None = None
    seconds: float = 0.0
    ended: bool = False


class Scene:
    """The demo's state; ``refresh()`` reads what is new."""

    def __init__(self, layout: Layout, *, steps: int, every: int, sets: Sequence[str]) -> None:
        """Plan a row for each snapshot of a trainer started with ``steps`` and ``every``."""
        self.sets = list(sets)
        self.steps = steps
        planned = sorted({*range(every, steps + 1, every), steps})
        self.rows = {step: Row(step) for step in planned}
        self.training = Training()
        self.status: StatusView | None = None
        #: terminal records by record id: a replay repeats them.
        self.points: dict[str, PointRecord] = {}
        self._layout = layout
        self._train_log = Follower(layout.log("train"))
        self._ledger = Follower(layout.ledger)

    def refresh(self) -> None:
        """Read the trainer's log, the status and the ledger; LedgerError on a broken line."""
        for line in self._train_log.read():
            self._hear(line)
        self.status = _read_status(self._layout.status) or self.status
        for record in decode_lines(self._ledger.read(), self._layout.ledger):
            if not isinstance(record, Newer):
                self._record(record)
        self._settle_states()

    def close(self) -> None:
        """Close the files."""
        self._train_log.close()
        self._ledger.close()

    @property
    def last_mean(self) -> float | None:
        """Mean of the last snapshot's point."""
        return self.rows[self.steps].mean

    @property
    def published(self) -> list[int]:
        """Steps whose snapshot is out."""
        return [row.step for row in self.rows.values() if row.published]

    def shortfalls(self, min_mean: float) -> list[str]:
        """Return what keeps the demo from being a success, one sentence each."""
        found = []
        if not self.training.ended:
            found.append("the trainer did not reach its end")
        missing = [step for step, row in self.rows.items() if not row.published]
        if missing:
            found.append(f"no snapshot of step {_join(missing)}")
        for row in self.rows.values():
            if row.record is None:
                found.append(f"step {row.step} has no terminal record")
            elif row.record.outcome is not Outcome.OK:
                reason = f" ({row.record.reason})" if row.record.reason else ""
                found.append(
                    f"step {row.step} ended {row.record.outcome}{reason}: {row.record.detail}"
                )
        if len(self.points) > len(self.published):
            found.append(f"{len(self.points)} points for {len(self.published)} snapshots")
        mean = self.last_mean
        if mean is not None and mean < min_mean:
            found.append(f"the last mean is {mean:.3f}, below {min_mean:g}")
        return found

    def _hear(self, line: bytes) -> None:
        """Take one line of the trainer's log; what is not its JSON is noise of its libraries."""
        try:
            event: Any = msgspec.json.decode(line)
        except msgspec.DecodeError:
            return
        if not isinstance(event, dict):
            return
        training = self.training
        match event.get("event"):
            case "progress":
                training.step, training.loss = event["step"], event["loss"]
                training.seconds = event["seconds"]
            case "published" if event["step"] in self.rows:
                self.rows[event["step"]].published = True
            case "end":
                training.ended = True

    def _record(self, record: Record) -> None:
        row = self.rows.get(record.step)
        if isinstance(record, SetRecord) and row is not None and record.kind is Kind.STEP:
            self._take_scores(row, [record.set], record.metrics)
        elif isinstance(record, PointRecord):
            self.points[record.record_id] = record
            if row is not None and record.kind is Kind.STEP:
                row.record = record
                row.scores.clear()
                row.sets_done.clear()
                self._take_scores(row, self.sets, record.metrics)
                lag = record.metrics.get("eval/lag_steps")
                row.lag_steps = None if lag is None else round(lag)

    def _take_scores(self, row: Row, sets: Iterable[str], metrics: dict[str, float]) -> None:
        for name in sets:
            if (score := metrics.get(f"eval/{name}")) is not None:
                row.scores[name] = score
                row.stderrs[name] = metrics.get(f"eval/{name}/stderr", 0.0)
                row.sets_done.add(name)

    def _settle_states(self) -> None:
        views: dict[int, PointView] = {}
        if self.status is not None:
            views = {point.step: point for point in self.status.queued + self.status.running}
        newest = max(self.published, default=0)
        training = self.training.loss is not None
        for row in self.rows.values():
            view = views.get(row.step)
            if row.record is not None:
                row.state = str(row.record.outcome)
            elif view is not None:
                # the status is up to a second old, and the ledger may know better
                late = row.sets_done and view.state in {"preparing", "waiting", "pinning"}
                row.state = "evaluating" if late else view.state
                row.scores |= {s.name: s.score for s in view.sets if s.score is not None}
            elif row.published:
                row.state = "published"
            else:
                row.state = "training" if training else ""
                training = False
            if row.record is None and row.published:
                row.lag_steps = newest - row.step


def _read_status(path: Path) -> StatusView | None:
    """Return the daemon's status, or None while there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StatusView)
    except FileNotFoundError:
        return None


def _join(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in steps)
