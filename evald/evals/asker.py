"""The engines as a point's questions see them."""

from __future__ import annotations

import uuid
from typing import Any

from evald.evals.custom.calls import Outcome, Serve
from evald.evals.custom.functions import Functions, Work
from evald.postures.contract import Engines, GenerateRequest, Generation, Pin


class PointAsker:
    """Fulfils ``kinds.Asker`` for one point; ``timeout_s`` bounds each request, and each sample.

    ``functions`` runs the user's own.
    """

    def __init__(
        self, engines: Engines, pin: Pin, functions: Functions, *, timeout_s: float
    ) -> None:
        self._engines = engines
        self._pin = pin
        self._functions = functions
        self._timeout_s = timeout_s

    async def generate(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        *,
        score_from: list[int] | None = None,
    ) -> list[Generation]:
        """Send one list request to engines of the pin."""
        request = GenerateRequest(
            prompts=prompts,
            sampling=sampling,
            score_from=score_from,
            rid=f"evald-{uuid.uuid4().hex}",
            timeout_s=self._timeout_s,
        )
        return await self._engines.generate(self._pin, request)

    async def run_function(self, work: Work, serve: Serve) -> Outcome:
        """Have the user's function answer one sample."""
        return await self._functions.call(work, serve, timeout_s=self._timeout_s)
