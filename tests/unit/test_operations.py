"""What operators may ask for, and when: a retry beside the ring that deletes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from evald.config import Dispatch, Results, Staging
from evald.dispatch import Dispatcher
from evald.errors import EvaldError
from evald.judge import skipped_record
from evald.operations import Operations
from evald.point import EvalPoint, Kind, Outcome, PointKey, Snapshot
from evald.regrade.alone import next_key
from evald.results.ledger import Ledger
from evald.results.records import PointRecord, SetRecord
from evald.run_ends import RunEnds
from evald.staging.digest import fingerprint
from evald.staging.retention import Retention
from evald.status.command import Command
from evald.testing import write_snapshot


class OkMeasure:
    """Ends each point ``ok`` at once."""

    async def run(
        self,
        point: EvalPoint,
        *,
        queued_s: float,  # noqa: ARG002 (the contract's)
        turn: asyncio.Event,
        on_spare: Callable[[], None],  # noqa: ARG002 (the contract's)
        on_state: Callable[[str], None],  # noqa: ARG002 (the contract's)
        on_set: Callable[[SetRecord], Awaitable[None]],  # noqa: ARG002 (the contract's)
    ) -> PointRecord:
        await turn.wait()
        record = skipped_record(point, "", "")
        record.outcome = Outcome.OK
        return record


async def has_room() -> None:
    """Say that the staging root is not full."""


class SlowRetention(Retention):
    """Gives up a snapshot only once the test lets it."""

    def __init__(self, config: Staging) -> None:
        super().__init__(config)
        self.retires = asyncio.Event()
        self.gate = asyncio.Event()

    async def retire(
        self,
        snapshot_dir: Path,
        fingerprint: str,
        *,
        key: PointKey | None = None,
        keep: bool = True,
    ) -> None:
        self.retires.set()
        await self.gate.wait()
        await super().retire(snapshot_dir, fingerprint, key=key, keep=keep)


class Room:
    """Operations with what they work on."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "root"
        self.root.mkdir()
        self.ledger = Ledger.open(Results(dir=str(tmp_path / "results")))
        self.retention = SlowRetention(Staging(root=str(self.root), keep=1))
        self.dispatcher = Dispatcher(
            Dispatch(),
            ledger=self.ledger,
            measure=OkMeasure(),  # type: ignore[arg-type]
            progress=lambda _key: [],
            retention=self.retention,
            shortage=has_room,
            run_ends=RunEnds(
                ledger=self.ledger, retention=self.retention, on_end=lambda _run: None
            ),
        )
        self.operate = Operations(
            run="r",
            dispatcher=self.dispatcher,
            posture=None,  # type: ignore[arg-type]
            retention=self.retention,
            index=self.ledger.index,
            next_key=lambda run, step, kind: next_key(self.ledger.index, run, step, kind),
            regrades=None,  # type: ignore[arg-type]
            stop=lambda: None,
            reload=self.reloaded,
        )

    async def reloaded(self) -> str:
        return "nothing has changed"

    def point(self, step: int, **snapshot: Any) -> EvalPoint:
        directory = write_snapshot(self.root / f"step_{step}", seed=step, answer=7)
        mark, size_bytes = fingerprint(directory, ".complete")
        known: dict[str, Any] = {
            "directory": directory,
            "fingerprint": mark,
            "size_bytes": size_bytes,
        }
        kind = snapshot.get("kind", Kind.STEP)
        return EvalPoint(
            PointKey("r", step, 0, kind), Snapshot(run="r", step=step, **(known | snapshot))
        )

    def outcome(self, step: int, revision: int = 0, kind: Kind = Kind.STEP) -> Outcome | None:
        state = self.ledger.index.get(PointKey("r", step, revision, kind))
        return state.outcome if state else None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    made = Room(tmp_path)
    task = asyncio.create_task(made.dispatcher.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        made.ledger.close()


@pytest.mark.parametrize("skipped", [False, True])
async def test_a_retry_waits_until_the_end_is_settled_and_then_keeps_its_bytes(
    tmp_path: Path, *, skipped: bool
) -> None:
    async with room(tmp_path) as r:
        point = r.point(1)
        r.dispatcher.pause(paused=skipped)
        await r.dispatcher.offer(point)
        ending = []
        if skipped:
            ending.append(asyncio.create_task(r.operate(Command(verb="skip", step=1))))
        await r.retention.retires.wait()
        # its record is there, but its snapshot is only now about to enter the ring
        assert r.outcome(1) is not None
        with pytest.raises(EvaldError, match="not ended yet"):
            await r.operate(Command(verb="retry", step=1))
        r.retention.gate.set()
        await asyncio.gather(*ending)
        await r.until(lambda: r.retention.kept and not r.dispatcher.is_open(point.key))
        r.dispatcher.pause(paused=True)
        assert await r.operate(Command(verb="retry", step=1)) == "r:step:1.r1 is queued"
        for step in (2, 3):  # fill the ring
            other = r.point(step)
            await r.retention.retire(other.snapshot.directory, other.snapshot.fingerprint)
        assert point.snapshot.directory.is_dir()
        r.dispatcher.pause(paused=False)
        await r.until(lambda: r.outcome(1, revision=1) is Outcome.OK)


async def test_a_retry_of_a_baseline_measures_the_baseline(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        r.retention.gate.set()
        baseline = r.point(0, kind=Kind.BASELINE, owned=False)
        await r.dispatcher.offer(baseline)
        await r.until(lambda: r.outcome(0, kind=Kind.BASELINE))
        await r.until(lambda: not r.dispatcher.is_open(baseline.key))
        await r.operate(Command(verb="retry", step=0))
        await r.until(lambda: r.outcome(0, 1, Kind.BASELINE) is Outcome.OK)


async def test_what_cannot_be_retried_says_why(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        r.retention.gate.set()
        shared = r.point(5, owned=False, fingerprint="shared:5", weight_version="5")
        unowned = r.point(6, owned=False, directory=tmp_path / "gone")
        for point in (shared, unowned):
            await r.dispatcher.offer(point)
        await r.until(lambda: r.outcome(6))
        await r.until(lambda: not r.dispatcher.is_open(unowned.key))
        for step, why in ((5, "only the trainer"), (6, "is deleted"), (7, "no such point")):
            with pytest.raises(EvaldError, match=why):
                await r.operate(Command(verb="retry", step=step))


async def test_a_reload_says_what_it_has_done(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        assert await r.operate(Command(verb="reload")) == "nothing has changed"
