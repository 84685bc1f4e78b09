"""The points that a pool works for, oldest first, and the orders that its engines get for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evald.engines.engine import Engine, Order
from evald.engines.state import State
from evald.postures.assignment import Seat, assign, can_spare
from evald.postures.campaign import Campaign
from evald.postures.contract import Pin
from evald.postures.stragglers import Mover, Stragglers


class Campaigns:
    """Gives ``engines`` their orders.

    ``rolling``: engines go to the next point one by one, so that several are under way. ``mover``
    frees an engine of a point's last answers where others have room; None: they stay where they
    are.
    """

    def __init__(
        self, engines: Sequence[Engine], *, rolling: bool, mover: Mover | None = None
    ) -> None:
        self._engines = engines
        self._rolling = rolling
        self._stragglers = None if mover is None else Stragglers(mover, engines, self.look)
        self._all: list[Campaign] = []

    def __iter__(self) -> Iterator[Campaign]:
        """All that are not closed, oldest first."""
        return iter(list(self._all))

    @property
    def newest(self) -> Campaign | None:
        """The newest one; None: no point wants an engine."""
        return self._all[-1] if self._all else None

    async def run(self) -> None:
        """Look for answers to be moved, whenever that is of use; until cancelled."""
        if self._stragglers is not None:
            await self._stragglers.run()

    def add(self, campaign: Campaign) -> None:
        """Take in a point behind all others."""
        self._all.append(campaign)

    def close(self, campaign: Campaign) -> None:
        """End a point: late answers can never count, and its engines are free."""
        campaign.closed = True
        if campaign in self._all:
            self._all.remove(campaign)

    def of_pin(self, pin: Pin) -> Campaign | None:
        """Return the point with this pin; None: it has ended."""
        return next((one for one in self._all if one.pin is pin), None)

    def of_order(self, order: Order | None) -> Campaign | None:
        """Return the point with this order; None: it has ended."""
        return next((one for one in self._all if one.order is order), None)

    # --- orders ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in a change of the engines, or of what points need."""
        wanted = [one for one in self._all if one.wants_engines]
        usable = [engine for engine in self._engines if engine.state is not State.QUARANTINED]
        seats = [self._seat(engine, wanted) for engine in usable]
        needs = [one.need(rolling=self._rolling) for one in wanted]
        numbers = dict(zip(usable, assign(needs, seats), strict=True))
        taker = next((n for n, need in enumerate(needs) if need.feeds and need.joinable), None)
        moves = self._choose(wanted, taker, numbers)
        if taker is not None:
            numbers |= {engine: taker for _, engine in moves}
        for number, campaign in enumerate(wanted):
            self._order(campaign, [engine for engine in usable if numbers[engine] == number])
        for engine in self._engines:
            if numbers.get(engine) is None:
                engine.give(None)
        for campaign in self._all:
            campaign.note_serving(self._engines, starved=self._starves(campaign))
        if taker is not None and self._stragglers is not None:
            self._stragglers.move(moves)
        untold = [] if taker is not None else [one for one in wanted if not one.spare_told]
        if untold and self._rolling and (moves or can_spare(needs, seats)):
            for campaign in untold:
                campaign.tell_spare()

    def _choose(
        self,
        wanted: Sequence[Campaign],
        taker: int | None,
        numbers: Mapping[Engine, int | None],
    ) -> list[tuple[Campaign, Engine]]:
        """Choose engines that can be emptied for the point ``taker``; None: for the next one."""
        if self._stragglers is None:
            return []
        if taker is None and (not wanted or wanted[-1].spare_told):
            return self._stragglers.choose([])  # nobody wants them, or is about to
        chosen = self._stragglers.choose([one for one in wanted[:taker] if one.left])
        if taker is not None and wanted[taker].scouting:
            # one goes first; the others would stand idle
            return [] if taker in numbers.values() else chosen[:1]
        return chosen

    # --- engines ---------------------------------------------------------------------------------

    def _seat(self, engine: Engine, wanted: Sequence[Campaign]) -> Seat:
        # without an order it keeps what it has, and answers for it
        order = engine.order or (engine.pinned if engine.state is State.SERVING else None)
        at = next((n for n, campaign in enumerate(wanted) if campaign.order is order), None)
        return Seat(
            alive=engine.at_work,
            at=at,
            arrived=order is not None and engine.serves(order),
            in_flight=engine.slots.in_flight,
            limit=engine.slots.limit,
        )

    def _order(self, campaign: Campaign, crew: Sequence[Engine]) -> None:
        """Order the engines of one point: all of them, or one that goes first."""
        if not campaign.open:  # the snapshot is gone: who serves it goes on, and nobody joins
            going: Sequence[Engine] = ()
        elif campaign.scouting:
            going = _scouts(campaign, crew)
        else:
            going = crew
        for engine in crew:
            engine.give(campaign.order if engine in going else None)

    def _starves(self, campaign: Campaign) -> bool:
        """Whether other points have all engines that work."""
        working = [engine for engine in self._engines if engine.at_work]
        if any(engine.order is campaign.order for engine in working):
            return False
        return any(self.of_order(engine.order) for engine in working)


def _scouts(campaign: Campaign, crew: Sequence[Engine]) -> list[Engine]:
    """Choose exactly one engine that tries: one that has not failed yet, where there is one."""
    scouts = [engine for engine in crew if engine.tries(campaign.order)]
    if scouts:
        return scouts
    alive = [engine for engine in crew if engine.alive]
    # nobody is: who had the order keeps it, and may start on it again; or who starts on a
    # snapshot that nobody wants any more
    able = alive or [engine for engine in crew if engine.order is campaign.order]
    able = able or [engine for engine in crew if engine.starting_on]
    return sorted(able, key=lambda engine: campaign.has_failed(engine.name))[:1]
