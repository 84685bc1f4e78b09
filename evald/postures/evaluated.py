"""A posture with engines: they are pinned or verified, and asked the questions of the eval sets."""

from __future__ import annotations

import asyncio
import weakref

import msgspec

from evald.config import Aggregate
from evald.errors import EvalSkip
from evald.evals.evaluator import Evaluator, PreparedPoint
from evald.evals.sets import LoadedSet
from evald.point import EvalPoint, PinTarget, PointKey, SkipReason
from evald.postures.contract import Engines, PointResult, Stages
from evald.pulse import Pulse
from evald.status.view import EngineView, SetView


class _Prepared(msgspec.Struct, frozen=True):
    """A point, and who prepared it: the same one must evaluate it."""

    evaluator: Evaluator
    point: PreparedPoint


class EvaluatedPosture:
    """Fulfils ``Posture`` with ``engines`` and ``evaluator``.

    ``loads``: snapshots are loaded into the engines; false: they are the trainer's own (shared),
    and a point names the weight version that they must have.
    """

    def __init__(self, engines: Engines, evaluator: Evaluator, *, loads: bool) -> None:
        self._engines = engines
        self._evaluator = evaluator
        self._loads = loads
        #: the present one, and earlier ones that points still need.
        self._evaluators = weakref.WeakSet([evaluator])
        #: who evaluates the points that run.
        self._running: dict[PointKey, Evaluator] = {}

    async def run(self) -> None:
        """Supervise the engines until cancelled."""
        await self._engines.run()

    async def prepare(self, point: EvalPoint) -> _Prepared:
        """Tokenize, and read what is needed of the snapshot beside its weights."""
        if not self._loads and point.snapshot.weight_version is None:
            raise EvalSkip(
                f"cannot load {point.snapshot.directory}: [shared] engines belong to the trainer, "
                'which asks with a request of kind "shared"; use another posture for snapshots',
                reason=SkipReason.INVALID_SNAPSHOT,
            )
        evaluator = self._evaluator
        return _Prepared(evaluator, await evaluator.prepare(point))

    async def measure(
        self,
        point: EvalPoint,
        prepared: _Prepared,
        *,
        digest: str,
        deadline: float,
        stages: Stages,
    ) -> PointResult:
        """Pin, prove, evaluate, and look once more at whose weights it was."""
        evaluator = self._running[point.key] = prepared.evaluator
        try:
            return await self._measure(point, prepared, digest, deadline, stages)
        finally:
            del self._running[point.key]
            if evaluator is not self._evaluator:
                await self._rest(evaluator)

    async def _measure(
        self, point: EvalPoint, prepared: _Prepared, digest: str, deadline: float, stages: Stages
    ) -> PointResult:
        stages.state("pinning")
        target = PinTarget(
            run=point.key.run,
            step=point.key.step,
            digest=digest,
            directory=point.snapshot.directory if self._loads else None,
            weight_version=point.snapshot.weight_version,
        )
        try:
            async with asyncio.timeout_at(deadline) as limit:
                pin = await self._engines.pin(target)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EvalSkip(
                f"no engine served {point.key} before the point's deadline; look into the engines' "
                "logs, or raise dispatch.point_deadline_s",
                reason=SkipReason.DEADLINE,
            ) from error
        try:
            self._engines.when_spare(pin, stages.spare)
            await stages.check_unchanged()
            stages.state("evaluating")
            result = await prepared.evaluator.evaluate(
                prepared.point,
                pin,
                self._engines,
                on_set=stages.set_done,
                set_begins=stages.set_begins,
                deadline=deadline,
            )
            await self._engines.confirm(pin)
        finally:
            await self._engines.unpin(pin)
        provenance = {**result.provenance, "sglang": pin.sglang_version}
        return msgspec.structs.replace(result, provenance=provenance)

    def engines(self) -> list[EngineView]:
        """Show the state of each engine."""
        return self._engines.engines()

    def pulses(self) -> list[Pulse]:
        """Pulse of each engine's task."""
        return self._engines.pulses()

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word."""
        await self._engines.restart(engine)

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine."""
        await self._engines.release(engine)

    def progress(self, key: PointKey) -> list[SetView]:
        """Show the progress of a point's sets."""
        evaluator = self._running.get(key)
        return [] if evaluator is None else evaluator.view(key)

    async def use(self, sets: list[LoadedSet], aggregates: list[Aggregate]) -> None:
        """Measure these sets from the next point on; what is prepared or runs keeps its own."""
        old, self._evaluator = self._evaluator, self._evaluator.successor(sets, aggregates)
        self._evaluators.add(self._evaluator)
        await self._rest(old)

    async def _rest(self, evaluator: Evaluator) -> None:
        """End the processes of an evaluator that no point uses any more."""
        if evaluator not in self._running.values():
            await evaluator.rest()

    async def close(self) -> None:
        """End the grader processes."""
        for evaluator in list(self._evaluators):
            await evaluator.close()
