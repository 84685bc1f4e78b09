"""One point's life between acceptance and its terminal record: prepare, measure, judge."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from evald.config import Dispatch
from evald.errors import EvalSkip, SnapshotGone, Superseded, Unhealthy
from evald.judge import judge, skipped_record
from evald.point import EvalPoint, SkipReason, Snapshot, Timings
from evald.postures.contract import PointResult, SetResult
from evald.postures.posture import Posture
from evald.results.records import PointRecord, SetRecord
from evald.results.time_used import PointTime, TimeUsed
from evald.staging.digest import content_digest, fingerprint
from evald.staging.failing import patiently

#: within that the engines' own task has ended the daemon.
_STOP_COMES_S = 10.0
#: a checkpoint that its trainer deletes is gone within that, file by file.
_VANISH_S = 5.0
_VANISH_POLL_S = 0.1
#: a point whose deadline is over gets what its journals hold, unless its lives still end before
#: that: in deadlines.
_LAST_CHANCE = 2
#: state of a point -> the field of its timings.
_STAGES = {
    "preparing": "prepare_s",
    "waiting": "queued_s",
    "pinning": "pin_s",
    "evaluating": "evaluate_s",
}


class Measure:
    """Measures points through a posture.

    ``marker`` is the marker's name, part of what makes a directory "unchanged". ``time_used`` knows
    what points have had of their deadlines in earlier lives; None: there were none.
    """

    def __init__(
        self,
        config: Dispatch,
        *,
        posture: Posture,
        marker: str,
        time_used: TimeUsed | None = None,
    ) -> None:
        self._config = config
        self._time_used = time_used
        self._posture = posture
        self._marker = marker

    async def run(
        self,
        point: EvalPoint,
        *,
        queued_s: float,
        turn: asyncio.Event,
        on_spare: Callable[[], None],
        on_state: Callable[[str], None],
        on_set: Callable[[SetRecord], Awaitable[None]],
    ) -> PointRecord:
        """Measure ``point``; every EvalSkip becomes a ``skipped`` record.

        ``queued_s``: how long the point has queued. ``turn`` is set when earlier points have no
        use for some engine any more: deadlines count from then. ``on_spare`` is called when that
        holds for this one. ``on_set`` is awaited with the record of each eval set as soon as
        the set is done. Cancellation passes through: the point then has no record and resumes
        later.
        """
        life = _Life(
            point,
            queued_s=queued_s,
            marker=self._marker,
            on_spare=on_spare,
            on_state=on_state,
            on_set=on_set,
        )
        try:
            life.state("preparing")
            prepared = await self._prepare(life)
            life.state("waiting")
            await turn.wait()
            await life.check_unchanged()
            if self._time_used is None:
                result = await self._measure(life, prepared)
            else:
                async with self._time_used.of(point.key) as life.time:
                    result = await self._measure(life, prepared)
            return judge(
                point,
                result,
                digest=life.digest,
                timings=life.finish(),
                sets=life.sets,
                limits=self._config,
            )
        except EvalSkip as skip:
            if self._is_stopping(skip):
                await asyncio.sleep(_STOP_COMES_S)
            return skipped_record(
                point, skip.reason, skip.detail, timings=life.finish(), digest=life.digest
            )

    async def _measure(self, life: _Life, prepared: Any) -> PointResult:
        """Measure within what is left of the deadline."""
        limit_s = self._config.point_deadline_s
        used_s = 0.0 if life.time is None else life.time.used_s
        if used_s > _LAST_CHANCE * limit_s:
            raise EvalSkip(
                f"the point has had {used_s:.0f} s in earlier lives of the daemon, each of which "
                f"was cut short, and dispatch.point_deadline_s = {limit_s:g}; look into the "
                "daemon's log for what ends it",
                reason=SkipReason.DEADLINE,
            )
        return await self._posture.measure(
            life.point,
            prepared,
            digest=life.digest or "",
            deadline=asyncio.get_running_loop().time() + max(limit_s - used_s, 0.0),
            stages=life,
        )

    def _is_stopping(self, skip: EvalSkip) -> bool:
        """Tell whether no engine is left, which stops the daemon: the point resumes later."""
        engines = self._posture.engines()
        lost = bool(engines) and all(engine.state == "quarantined" for engine in engines)
        return isinstance(skip, Unhealthy) and lost

    async def _prepare(self, life: _Life) -> Any:
        """Read and hash while an earlier point still has the engines."""
        limit_s = self._config.point_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                await life.check_unchanged()
                prepared, life.digest = await self._read(life.point)
        except FileNotFoundError as error:
            raise _gone(life.point.snapshot) from error
        except TimeoutError as error:
            raise EvalSkip(
                f"cannot read {life.point.snapshot.directory} within {limit_s:g} s: the file "
                "system hangs",
                reason=SkipReason.DEADLINE,
            ) from error
        return prepared

    async def _read(self, point: EvalPoint) -> tuple[Any, str]:
        """Read what the posture needs, and hash, at the same time; the first failure ends both."""
        both = [
            asyncio.create_task(patiently(lambda: self._posture.prepare(point))),
            asyncio.create_task(patiently(lambda: self._digest(point.snapshot))),
        ]
        try:
            prepared, digest = await asyncio.gather(*both)
        finally:
            for one in both:
                one.cancel()
            await asyncio.wait(both)
        return prepared, digest

    async def _digest(self, snapshot: Snapshot) -> str:
        if snapshot.digest is not None:
            return snapshot.digest
        stop = threading.Event()
        try:
            return await asyncio.to_thread(
                content_digest, snapshot.directory, self._marker, stop=stop
            )
        finally:
            stop.set()  # a thread cannot be cancelled


class _Life:
    """One point on its way: fulfils ``contract.Stages``, keeps stage times and set records."""

    def __init__(
        self,
        point: EvalPoint,
        *,
        queued_s: float,
        marker: str,
        on_spare: Callable[[], None],
        on_state: Callable[[str], None],
        on_set: Callable[[SetRecord], Awaitable[None]],
    ) -> None:
        self.point = point
        #: fulfils ``contract.Stages``.
        self.spare = on_spare
        self.digest = point.snapshot.digest
        #: those that are done.
        self.sets: list[SetResult] = []
        #: what counts for its deadlines, while it holds the engines.
        self.time: PointTime | None = None
        self._marker = marker
        self._on_state = on_state
        self._on_set = on_set
        self._waited_s = queued_s
        self._started = self._mark = time.monotonic()
        self._stage = ""
        self._timings = Timings(validate_s=point.snapshot.validate_s, queued_s=queued_s)

    def state(self, state: str) -> None:
        """Book the time of the stage that ends, and tell of the one that begins."""
        self._book()
        self._stage = _STAGES[state]
        self._on_state(state)

    def set_begins(self, name: str) -> float:
        """Tell how many seconds a set has had in earlier lives of the daemon."""
        return 0.0 if self.time is None else self.time.begin(name)

    async def set_done(self, result: SetResult) -> None:
        """Write the record of a set."""
        key = self.point.key
        if self.time is not None:
            self.time.end(result.name)
        record = SetRecord(
            run=key.run,
            step=key.step,
            revision=key.revision,
            record_id=f"{key.record_id}/{result.name}",
            kind=key.kind,
            set=result.name,
            counts=result.counts,
            seconds=result.seconds,
            metrics={**result.metrics, "eval/step": key.step},
        )
        self.sets.append(result)
        await self._on_set(record)

    async def check_unchanged(self) -> None:
        """Raise SnapshotGone or Superseded when the bytes are no longer those of the point."""
        if self.point.snapshot.weight_version is None:
            await patiently(lambda: asyncio.to_thread(self._check_directory))

    def _check_directory(self) -> None:
        snapshot = self.point.snapshot
        directory = snapshot.directory
        try:
            seen, _ = fingerprint(directory, self._marker)
        except FileNotFoundError as error:
            # deleted after the load, not rewritten: what is loaded is what was hashed
            deleted = not _is_dir(directory) if snapshot.owned else _vanishes(directory)
            if self._stage == "pin_s" and deleted:
                return
            raise _gone(snapshot) from error
        if seen != snapshot.fingerprint and not snapshot.owned and _vanishes(directory):
            if self._stage == "pin_s":
                return
            raise _gone(snapshot)
        if seen != snapshot.fingerprint:
            raise Superseded(
                f"{directory} was rewritten after it had been accepted, so its weights are no "
                f"longer those of {self.point.key}; the new bytes are a point of their own"
            )

    def finish(self) -> Timings:
        """Return the stage times with the total."""
        self._book()
        self._timings.total_s = self._waited_s + time.monotonic() - self._started
        return self._timings

    def _book(self) -> None:
        now = time.monotonic()
        if self._stage:
            so_far = getattr(self._timings, self._stage)
            setattr(self._timings, self._stage, so_far + now - self._mark)
        self._mark = now


def _gone(snapshot: Snapshot) -> SnapshotGone:
    remedy = (
        "only evald may delete in an owned root"
        if snapshot.owned
        else "let the trainer keep more checkpoints, or save fewer"
    )
    return SnapshotGone(
        f"cannot read snapshot {snapshot.directory}: it vanished before it was pinned; {remedy}"
    )


def _vanishes(directory: Path) -> bool:
    """Tell whether a changed directory is one that its trainer is deleting, file by file."""
    deadline = time.monotonic() + _VANISH_S
    while _is_dir(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_VANISH_POLL_S)
    return True


def _is_dir(directory: Path) -> bool:
    return os.path.isdir(directory)  # noqa: PTH112 (Path.is_dir raises for a closed one)
