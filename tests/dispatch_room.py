"""A dispatcher with its surroundings, and points whose end the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from evald.config import Dispatch, Results, Staging
from evald.dispatch import Dispatcher
from evald.judge import skipped_record
from evald.point import EvalPoint, Outcome, PointKey, Snapshot
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.records import AnyRecord, PointRecord, SetRecord
from evald.run_ends import RunEnds
from evald.staging.retention import Retention
from evald.status.view import SetView


class HeldMeasure:
    """Ends each point ``ok`` once the test has released its step."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        #: to be called when a step lets the next one go on beside it.
        self.spare: dict[int, Callable[[], None]] = {}

    def gate(self, step: int) -> asyncio.Event:
        return self.gates.setdefault(step, asyncio.Event())

    async def run(
        self,
        point: EvalPoint,
        *,
        queued_s: float,
        turn: asyncio.Event,
        on_spare: Callable[[], None],
        on_state: Callable[[str], None],
        on_set: Callable[[SetRecord], Awaitable[None]],  # noqa: ARG002 (the contract's)
    ) -> PointRecord:
        self.started.append(point.key.step)
        on_state("waiting")
        assert queued_s >= 0
        await turn.wait()
        on_state("evaluating")
        self.spare[point.key.step] = on_spare
        await self.gate(point.key.step).wait()
        record = skipped_record(point, "", "")
        record.outcome, record.metrics = Outcome.OK, {"eval/x": 1.0}
        return record


class Room:
    """A dispatcher with its surroundings."""

    def __init__(self, tmp_path: Path, **dispatch: Any) -> None:
        self.tmp_path = tmp_path
        self.ledger = Ledger.open(Results(dir=str(tmp_path / "results")))
        self.measure = HeldMeasure()
        self.shortage: str | None = None
        self.ended_runs: list[str] = []
        owned = dispatch.pop("owned", True)
        staging = Staging(root=str(tmp_path / "root"), keep=0, owned=owned)
        (tmp_path / "root").mkdir(exist_ok=True)
        baseline = dispatch.pop("baseline_of", None)
        retention = Retention(staging)
        self.dispatcher = Dispatcher(
            Dispatch(**dispatch),
            ledger=self.ledger,
            measure=self.measure,  # type: ignore[arg-type]
            progress=lambda key: [SetView(name=f"x{key.step}", done=1, total=2)],
            retention=retention,
            shortage=self._shortage,
            run_ends=RunEnds(
                ledger=self.ledger, retention=retention, on_end=self.ended_runs.append
            ),
            baseline=baseline,
        )

    async def _shortage(self) -> str | None:
        return self.shortage

    def point(self, step: int, *, final: bool = False, revision: int = 0) -> EvalPoint:
        return EvalPoint(
            PointKey("r", step, revision),
            Snapshot(
                run="r",
                step=step,
                directory=self.tmp_path / "root" / f"step_{step}",
                fingerprint=f"f{step}",
                size_bytes=10,
                final=final,
            ),
        )

    def release(self, *steps: int) -> None:
        for step in steps:
            self.measure.gate(step).set()

    @property
    def records(self) -> list[AnyRecord]:
        return read_records(self.tmp_path / "results" / "results.jsonl")

    def ends(self) -> dict[int, tuple[str, str]]:
        return {
            r.step: (str(r.outcome), r.reason) for r in self.records if isinstance(r, PointRecord)
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def room(tmp_path: Path, **dispatch: Any) -> AsyncIterator[Room]:
    made = Room(tmp_path, **dispatch)
    task = asyncio.create_task(made.dispatcher.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        made.ledger.close()
