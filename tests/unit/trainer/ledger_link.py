"""A ledger in memory, behind the protocol by which a training job asks evald."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.point import Kind, Outcome, PointKey
from evald.results.records import Accepted, Counts, PointRecord, Record, SetRecord
from evald.status.view import StatusView


class LedgerLink:
    """Beats at every look, until it ``stands`` still; ``silent``: there is no status at all."""

    where = "memory"

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.beat = 0
        self.stands = False
        self.silent = False
        self.restarts = 0
        self.closed = False
        #: records that a ledger on a network file system does not show yet.
        self.hidden = 0

    def status(self) -> StatusView | None:
        if self.silent:
            return None
        self.beat += not self.stands
        return StatusView(
            version="1",
            pid=1,
            beat=self.beat,
            time=0.0,
            uptime_s=1.0,
            state="serving",
            run="r",
            results="",
            cap=2,
            last_seq=len(self.lines),
        )

    def records(self, after: int) -> list[dict[str, Any]]:
        seen = self.lines[: len(self.lines) - self.hidden]
        return [line for line in seen if line["seq"] > after][:3]  # a page

    def samples(self, record_id: str, set_name: str) -> list[dict[str, Any]] | None:
        return self.rows.get((record_id, set_name))

    def close(self) -> None:
        self.closed = True

    # --- what the daemon writes ------------------------------------------------------------------

    def append(self, record: Record) -> None:
        line = msgspec.to_builtins(record)
        self.lines.append({**line, "seq": len(self.lines) + 1})

    def accept(self, key: PointKey) -> None:
        self.append(
            Accepted(
                run=key.run,
                step=key.step,
                revision=key.revision,
                record_id=f"{key.record_id}/accepted",
                kind=key.kind,
                directory="d",
                size_bytes=1,
                fingerprint="f",
            )
        )

    def measure(self, key: PointKey, name: str, *, n_total: int, score: float) -> None:
        self.append(
            SetRecord(
                run=key.run,
                step=key.step,
                revision=key.revision,
                record_id=f"{key.record_id}/{name}",
                kind=key.kind,
                set=name,
                counts=Counts(n_total=n_total, n_scored=n_total),
                seconds=1.0,
                metrics={f"eval/{name}": score},
            )
        )

    def end(self, key: PointKey, outcome: Outcome = Outcome.OK, **fields: Any) -> None:
        self.append(
            PointRecord(
                run=key.run,
                step=key.step,
                revision=key.revision,
                record_id=key.record_id,
                kind=key.kind,
                outcome=outcome,
                **{"digest": "d", "metrics": {"eval/step": float(key.step)}, **fields},
            )
        )

    def answer(self, key: PointKey, score: float = 0.5) -> None:
        """One whole life of a point."""
        self.accept(key)
        self.measure(key, "a", n_total=2, score=score)
        self.end(key, metrics={"eval/step": float(key.step), "eval/a": score})


def baseline(step: int = -1) -> PointKey:
    return PointKey("r", step, 0, Kind.BASELINE)
