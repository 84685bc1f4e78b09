"""What each point has in flight on each lane, and what of it is being moved to another one."""

from __future__ import annotations

import asyncio

from evald.postures.campaign import Campaign
from evald.postures.lane import Lane

#: a server knows a request a moment after it was sent, and takes an abort that comes before that
#: for one of a request that is over: so that is said again until the request has ended. Doubles
#: from the first to the last: a server that hangs answers none of them.
ABORT_AGAIN_S, LAST_ABORT_AGAIN_S = 0.5, 10.0


class Flight:
    """One list request under way: the ids of its samples, and whether all of them can be moved."""

    def __init__(self, campaign: Campaign, lane: Lane, rids: list[str], *, movable: bool) -> None:
        self.campaign = campaign
        self.lane = lane
        self.rids = rids
        self.movable = movable
        #: it has been aborted, to go on elsewhere.
        self.moving = False
        self._wait_s = ABORT_AGAIN_S
        self._again: asyncio.TimerHandle | None = None

    def move(self) -> None:
        """Abort it, and again until ``land``."""
        self.moving = True
        self.lane.abort_soon(self.rids)
        self._again = asyncio.get_running_loop().call_later(self._wait_s, self.move)
        self._wait_s = min(2 * self._wait_s, LAST_ABORT_AGAIN_S)

    def land(self) -> None:
        """Take in that it has ended, well or not."""
        if self._again is not None:
            self._again.cancel()


class Flights:
    """All requests under way, by point and lane."""

    def __init__(self) -> None:
        self._there: dict[tuple[Campaign, Lane], set[Flight]] = {}

    def begin(self, flight: Flight) -> None:
        """Take in a request that is being sent."""
        self._there.setdefault((flight.campaign, flight.lane), set()).add(flight)

    def end(self, flight: Flight) -> None:
        """Take in that it has ended, well or not."""
        flight.land()
        key = (flight.campaign, flight.lane)
        self._there[key].remove(flight)
        if not self._there[key]:
            del self._there[key]

    def samples(self, campaign: Campaign, lane: Lane) -> int:
        """Count the samples of a point on a lane."""
        return sum(len(flight.rids) for flight in self.of(campaign, lane))

    def of(self, campaign: Campaign, lane: Lane) -> set[Flight]:
        """Give the requests of a point on a lane."""
        return self._there.get((campaign, lane), set())
