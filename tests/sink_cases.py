"""What the tests of sinks share: a ledger that is written line by line, and a delivery from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from evald.point import Kind, Outcome
from evald.results.records import AnyRecord, Counts, PointRecord, RunEnd, SetRecord
from evald.results.sinks.contract import Sink
from evald.results.sinks.delivery import Delivery
from evald.results.sinks.source import FileSource


def set_done(step: int, name: str = "a", value: float = 0.5, **more: Any) -> SetRecord:
    revision = more.pop("revision", 0)
    run = more.pop("run", "demo")
    return SetRecord(
        run=run,
        step=step,
        revision=revision,
        record_id=f"{run}/step/{step}/r{revision}/{name}",
        set=name,
        counts=Counts(n_total=1),
        seconds=0.5,
        metrics={f"eval/{name}": value, "eval/step": step},
    )


def ended(step: int, revision: int = 0, run: str = "demo", **metrics: float) -> PointRecord:
    named = {f"eval/{name}": value for name, value in metrics.items()}
    return PointRecord(
        run=run,
        step=step,
        revision=revision,
        record_id=f"{run}/step/{step}/r{revision}",
        outcome=Outcome.OK,
        metrics={**named, "eval/step": step},
    )


def skipped(
    step: int, reason: str = "busy", *, revision: int = 0, void: tuple[str, ...] = ()
) -> PointRecord:
    record = ended(step, revision)
    record.outcome, record.reason = Outcome.SKIPPED, reason
    record.metrics = {"eval/step": step, f"eval/skipped_{reason}": 1}
    record.void_sets = [f"demo/step/{step}/r{revision}/{name}" for name in void]
    return record


def baseline(**metrics: float) -> PointRecord:
    return msgspec.structs.replace(
        ended(0),
        kind=Kind.BASELINE,
        record_id="demo/baseline/0/r0",
        metrics={f"eval/{name}": value for name, value in metrics.items()},
    )


def run_end(run: str = "demo") -> RunEnd:
    return RunEnd(run=run, step=0, record_id=f"{run}/end", points={})


class Book:
    """A ledger in a directory; times are its own."""

    def __init__(self, directory: Path, *, time: float = 1000.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "results.jsonl"
        self._time = time
        self._seq = 0

    def add(self, *records: AnyRecord) -> None:
        with self.path.open("ab") as file:
            for record in records:
                self._seq += 1
                record.seq, record.time = self._seq, self._time + self._seq
                file.write(msgspec.json.encode(record) + b"\n")


def deliver(
    book: Book,
    make: Callable[[str], Sink],
    *,
    patience_s: float = 0.0,
    run: str | None = None,
    said: list[str] | None = None,
) -> int:
    """One life of a reader: deliver what is there now; return how many rows that were."""
    delivery = Delivery(
        FileSource(book.path),
        make,
        run=run,
        say=(said if said is not None else []).append,
        stop=threading.Event(),
        patience_s=patience_s,
    )
    delivery.run(once=True)
    return delivery.n_rows
