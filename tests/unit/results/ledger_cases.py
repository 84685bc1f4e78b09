"""What the tests of the ledger share: records of run "a", and a ledger full of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evald.config import Results
from evald.point import Outcome
from evald.results.ledger import Ledger
from evald.results.records import Accepted, Counts, PointRecord, SetRecord


def accepted(step: int) -> Accepted:
    return Accepted(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0/accepted",
        directory="/d",
        size_bytes=1,
        fingerprint="f",
    )


def ended(step: int, **metrics: float) -> PointRecord:
    return PointRecord(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0",
        outcome=Outcome.OK,
        detail='quotes " and\nnewlines and ünïcode',
        metrics=metrics,
    )


def set_done(step: int) -> SetRecord:
    return SetRecord(
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0/x",
        set="x",
        counts=Counts(n_total=1),
        seconds=0.5,
        metrics={},
    )


def config(directory: Path, **changes: Any) -> Results:
    return Results(dir=str(directory / "results"), **changes)


def file(directory: Path) -> Path:
    return directory / "results" / "results.jsonl"


async def fill(directory: Path, steps: int = 2) -> bytes:
    ledger = Ledger.open(config(directory), wall=lambda: 1.5)
    for step in range(steps):
        await ledger.append(accepted(step))
        await ledger.append(set_done(step))
        await ledger.append(ended(step))
    ledger.close()
    return file(directory).read_bytes()
