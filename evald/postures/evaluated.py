"""A posture with engines: they are pinned or verified, and asked the questions of the eval sets."""

from __future__ import annotations

import asyncio

import msgspec

from evald.errors import EvalSkip
from evald.evals.evaluator import Evaluator, PreparedPoint
from evald.point import EvalPoint, PinTarget, SkipReason
from evald.postures.contract import Engines, PointResult, Stages
from evald.status.view import EngineView, SetView


class EvaluatedPosture:
    """Fulfils ``Posture`` with ``engines`` and ``evaluator``.

    ``loads``: snapshots are loaded into the engines; false: they are the trainer's own (shared),
    and a point names the weight version that they must have.
    """

    def __init__(self, engines: Engines, evaluator: Evaluator, *, loads: bool) -> None:
        self._engines = engines
        self._evaluator = evaluator
        self._loads = loads

    async def run(self) -> None:
        """Supervise the engines until cancelled."""
        await self._engines.run()

    async def prepare(self, point: EvalPoint) -> PreparedPoint:
        """Tokenize, and read what is needed of the snapshot beside its weights."""
        if not self._loads and point.snapshot.weight_version is None:
            raise EvalSkip(
                f"cannot load {point.snapshot.directory}: [shared] engines belong to the trainer, "
                'which asks with a request of kind "shared"; use another posture for snapshots',
                reason=SkipReason.INVALID_SNAPSHOT,
            )
        return await self._evaluator.prepare(point)

    async def measure(
        self,
        point: EvalPoint,
        prepared: PreparedPoint,
        *,
        digest: str,
        deadline: float,
        stages: Stages,
    ) -> PointResult:
        """Pin, prove, evaluate, and look once more at whose weights it was."""
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
            await stages.check_unchanged()
            stages.state("evaluating")
            result = await self._evaluator.evaluate(
                prepared, pin, self._engines, on_set=stages.set_done, deadline=deadline
            )
            await self._engines.confirm(pin)
        finally:
            await self._engines.unpin(pin)
        provenance = {**result.provenance, "sglang": pin.sglang_version}
        return msgspec.structs.replace(result, provenance=provenance)

    def engines(self) -> list[EngineView]:
        """Show the state of each engine."""
        return self._engines.engines()

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word."""
        await self._engines.restart(engine)

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine."""
        await self._engines.release(engine)

    def progress(self) -> list[SetView]:
        """Show the progress of the running point's sets."""
        return self._evaluator.view()

    async def close(self) -> None:
        """End the grader processes."""
        await self._evaluator.close()
