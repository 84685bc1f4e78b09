"""The last answers of points: which of their engines have few enough of them to be emptied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from evald.engines.engine import Engine
from evald.postures.campaign import Campaign
from evald.postures.consolidation import Straggling, engines_to_free

log = structlog.get_logger(__name__)

#: while something could be moved, that is looked at this often: answers get fewer one by one.
LOOK_S = 0.2


class Mover(Protocol):
    """Who moves answers that are under way (``Router``)."""

    def in_flight(self, campaign: Campaign, lane: Engine) -> int:
        """Count the samples that a point has in flight on an engine."""

    def movable(self, campaign: Campaign, lane: Engine) -> bool:
        """Whether all of them can go on elsewhere."""

    def move(self, campaign: Campaign, lane: Engine) -> int:
        """Have them go on elsewhere; how many."""


class Stragglers:
    """Chooses engines to be emptied, and has it done by ``mover``.

    ``look``: called now and then while something could be moved.
    """

    def __init__(self, mover: Mover, engines: Sequence[Engine], look: Callable[[], None]) -> None:
        self._mover = mover
        self._engines = engines
        self._look = look
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Look whenever that is of use; until cancelled."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(LOOK_S)
            self._look()

    def choose(self, points: Sequence[Campaign]) -> list[tuple[Campaign, Engine]]:
        """Choose engines of ``points`` whose answers fit beside those on others of the same point.

        ``points`` have nothing to hand over any more, and another one could use their engines.
        """
        self._wanted.clear()
        chosen: list[tuple[Campaign, Engine]] = []
        for campaign in points:
            crew = [engine for engine in self._engines if _answers(engine, campaign)]
            if len(crew) < 2 or not all(engine.may_move for engine in crew):  # noqa: PLR2004 (two)
                continue
            self._wanted.set()
            # whoever waits fewer seconds for the last answers than a pin takes wins nothing
            late = campaign.is_late(max(engine.pin_s for engine in crew))
            if late and not campaign.waiting and not self._is_moving(campaign, crew):
                found = [self._straggling(campaign, engine) for engine in crew]
                chosen += [(campaign, crew[i]) for i in engines_to_free(found, len(crew))]
        return chosen

    def move(self, chosen: Sequence[tuple[Campaign, Engine]]) -> None:
        """Empty engines, which are ordered elsewhere already."""
        for campaign, engine in chosen:
            samples = self._mover.move(campaign, engine)
            log.info(
                "stragglers_moved",
                directory=campaign.order.name,
                engine=engine.name,
                samples=samples,
            )

    def _is_moving(self, campaign: Campaign, crew: Sequence[Engine]) -> bool:
        """Whether some are on their way already: they will take room."""
        others = (engine for engine in self._engines if engine not in crew)
        return any(self._mover.in_flight(campaign, engine) for engine in others)

    def _straggling(self, campaign: Campaign, engine: Engine) -> Straggling:
        load = engine.limit.meter.load
        return Straggling(
            running=engine.slots.in_flight,
            limit=engine.slots.limit,
            kv_use=0.0 if load is None else load.token_usage,
            movable=self._mover.movable(campaign, engine),
        )


def _answers(engine: Engine, campaign: Campaign) -> bool:
    """Whether an engine has answers of a point under way, and may get more of them."""
    return engine.slots.in_flight > 0 and engine.serves(campaign.order)
