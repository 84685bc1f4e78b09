"""The engines as the questions of one attempt on a point see them."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from evald.evals.custom.calls import Outcome, Serve
from evald.evals.custom.functions import Functions, Work
from evald.postures.contract import Engines, GenerateRequest, Generation, Pin


class PointAsker:
    """Fulfils ``kinds.Asker`` for one point; ``timeout_s`` bounds each request, and each sample.

    ``functions`` runs the user's own. The ids of its requests begin with a nonce: an answer to an
    earlier attempt on the point, or to anything else, has another id and is void.
    """

    def __init__(
        self, engines: Engines, pin: Pin, functions: Functions, *, timeout_s: float
    ) -> None:
        self._engines = engines
        self._pin = pin
        self._functions = functions
        self._timeout_s = timeout_s
        self._attempt = f"evald-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

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
            rid=f"{self._attempt}-{next(self._numbers)}",
            timeout_s=self._timeout_s,
        )
        return await self._engines.generate(self._pin, request)

    async def run_function(self, work: Work, serve: Serve) -> Outcome:
        """Have the user's function answer one sample."""
        return await self._functions.call(work, serve, timeout_s=self._timeout_s)
