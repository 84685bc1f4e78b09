"""A staging root with an intake in front of a simple dispatcher, for the intake tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from evald.config import Staging
from evald.point import EvalPoint, Outcome, PointKey
from evald.results.index import PointIndex
from evald.results.records import Accepted, PointRecord
from evald.staging.intake import Intake
from evald.staging.offers import InvalidPoint, LostPoint, Offer, RunEnded, TrainerSkip
from evald.staging.retention import Retention
from evald.staging.validate import BaseModel
from evald.testing import Tensor, model_tensors, write_snapshot


@cache
def weights(seed: int) -> dict[str, Tensor]:
    return model_tensors(seed=seed)


def snapshot(directory: Path, seed: int = 0, **arguments: Any) -> Path:
    return write_snapshot(directory, tensors=weights(seed), tokenizer=False, **arguments)


class Node:
    """An intake, and a dispatcher that accepts all and ends points when told to."""

    def __init__(self, root: Path, base: BaseModel, index: PointIndex | None = None) -> None:
        self.root = root
        self.base = base
        self.index = index or PointIndex()
        self.offers: asyncio.Queue[Offer] = asyncio.Queue()
        self.alerts: list[tuple[str, str]] = []
        self.config = Staging(root=str(root), scan_interval_s=0.5)
        self.seq = 0

    @asynccontextmanager
    async def life(self, **config: Any) -> AsyncIterator[Intake]:
        self.config = msgspec.structs.replace(self.config, **config)
        self.retention = Retention(self.config, on_alert=self._alert)
        intake = Intake(
            self.config,
            run="run",
            base=self.base,
            index=self.index,
            retention=self.retention,
            offer=self._offer,
            on_alert=self._alert,
            baseline_step=-1,
        )
        task = asyncio.create_task(intake.run())
        try:
            async with asyncio.timeout(30):
                await intake.armed.wait()
            yield intake
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
        assert task.cancelled(), task.exception()

    async def _alert(self, name: str, detail: str) -> None:
        self.alerts.append((name, detail))

    async def _offer(self, offer: Offer) -> None:
        match offer:
            case EvalPoint():
                self._accept(offer)
            case InvalidPoint(point=point):
                await self.end(point, Outcome.SKIPPED)
            case LostPoint(key=key):
                self._end(key, Outcome.SKIPPED)
            case TrainerSkip(key=key, path=path):
                self._end(key, Outcome.SKIPPED)
                path.unlink()
            case RunEnded(path=path):
                path.unlink()
        self.offers.put_nowait(offer)

    def _accept(self, point: EvalPoint) -> None:
        key, one = point.key, point.snapshot
        if self.index.get(key) is not None:
            return
        self.index.apply(
            Accepted(
                run=key.run,
                step=key.step,
                revision=key.revision,
                kind=key.kind,
                record_id=f"{key.record_id}/accepted",
                directory=str(one.directory),
                size_bytes=one.size_bytes,
                fingerprint=one.fingerprint,
                digest=one.digest,
                owned=one.owned,
            )
        )

    def _end(self, key: PointKey, outcome: Outcome, **fields: Any) -> None:
        self.seq += 1
        self.index.apply(
            PointRecord(
                seq=self.seq,
                run=key.run,
                step=key.step,
                revision=key.revision,
                kind=key.kind,
                record_id=key.record_id,
                outcome=outcome,
                **fields,
            )
        )

    async def end(self, point: EvalPoint, outcome: Outcome = Outcome.OK) -> None:
        one = point.snapshot
        self._end(
            point.key,
            outcome,
            directory=str(one.directory),
            fingerprint=one.fingerprint,
            digest=one.digest,
        )
        if one.owned:
            await self.retention.retire(one.directory, one.fingerprint, key=point.key)

    async def next(self) -> Offer:
        async with asyncio.timeout(20):
            return await self.offers.get()

    async def next_point(self) -> EvalPoint:
        offer = await self.next()
        assert isinstance(offer, EvalPoint), offer
        return offer

    async def nothing_more(self) -> None:
        await asyncio.sleep(1.2)
        assert self.offers.empty(), self.offers.get_nowait()

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()} - {".evald"}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.02)
