"""Where requests can be sent."""

from __future__ import annotations

from typing import Any, Protocol

from evald.engines.answers import Answer
from evald.engines.engine import Order
from evald.engines.slots import Slots


class LaneAPI(Protocol):
    """What requests need of a server; both raise the errors of ``engines.api``."""

    async def generate(
        self,
        input_ids: list[list[int]],
        sampling: list[dict[str, Any]],
        rids: list[str],
        *,
        timeout_s: float,
        score_from: list[int] | None = None,
    ) -> list[Answer]:
        """Answer a list of prompts, one answer for each."""
        ...

    async def detokenize(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Give the text of each list of token ids."""
        ...


class Lane(Protocol):
    """Where requests can be sent: an engine, or somebody's router in front of all of them."""

    @property
    def name(self) -> str:
        """What to call it."""

    @property
    def slots(self) -> Slots:
        """What it has in flight, and may have."""

    def serves(self, order: Order) -> bool:
        """Whether it takes requests for ``order`` now."""

    def connected_api(self) -> LaneAPI:
        """Return its API; raises EngineUnreachable when there is none."""

    def credit(self, version: str, tokens: int, *, prompt_tokens: int, whole: bool = True) -> str:
        """Note a good answer of ``version``; returns the engine that it came from.

        ``whole``: false for a piece of an answer that ends on another lane.
        """

    def abort_soon(self, rids: list[str]) -> None:
        """Abort requests whose answers nobody waits for any more, or only for what there is."""

    @property
    def life(self) -> int:
        """Number of its process."""

    def is_dead(self, life: int) -> bool:
        """Whether that process has ended, or is ending."""

    def distrust(self, detail: str) -> None:
        """Take in that it answered with weights that nobody asked for."""
