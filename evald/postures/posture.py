"""The one contract of all postures."""

from __future__ import annotations

from typing import Any, Protocol

from evald.config import Aggregate
from evald.evals.sets import LoadedSet
from evald.point import EvalPoint, PointKey
from evald.postures.contract import PointResult, Stages
from evald.pulse import Pulse
from evald.status.view import EngineView, SetView


class Posture(Protocol):
    """Who measures a point: chosen by the config, the same for every point."""

    async def run(self) -> None:
        """Supervise until cancelled; leaves no process behind."""

    async def prepare(self, point: EvalPoint) -> Any:
        """Do what can be done while an earlier point is still being measured.

        What is needed of a snapshot beside its weights is read here. Raises EvalSkip.
        """

    async def measure(
        self, point: EvalPoint, prepared: Any, *, digest: str, deadline: float, stages: Stages
    ) -> PointResult:
        """Measure ``point``, whose bytes have ``digest``; another one only after ``stages.spare``.

        ``deadline``: in the loop's time; what is outstanding then counts as timed out. Raises
        EvalSkip. Cancellation leaves nothing that could count later.
        """

    def engines(self) -> list[EngineView]:
        """State of each engine (or process) for status and records."""

    def pulses(self) -> list[Pulse]:
        """Pulse of each task that must get on."""

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word; raises EvaldError (no such engine)."""

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine; raises EvaldError (not in quarantine)."""

    def progress(self, key: PointKey) -> list[SetView]:
        """Progress of a point's sets; empty when it does not run."""

    async def use(self, sets: list[LoadedSet], aggregates: list[Aggregate]) -> None:
        """Measure these sets from the next point on; what is prepared or runs keeps its own."""

    async def close(self) -> None:
        """End what ``run`` does not own (grader processes); called after ``run`` has ended."""
