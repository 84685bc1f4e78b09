"""Rank 0 decides, and every rank hears the same: one exchange for each decision."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evald.trainer.contract import Ranks

#: other ranks hear from rank 0 this often while it waits: far below any rank's timeout.
_SIGN_OF_LIFE_S = 20.0
_WAIT = "evald: wait"


class Agreement:
    """Makes one rank's decision everybody's; while rank 0 decides, the others wait for it.

    However long it takes (rank 0 may be waiting for room at the daemon), the ranks' own timeout is
    not hit: :meth:`keep_waiting`, called on the way, tells the others to go on waiting.
    """

    def __init__(self, ranks: Ranks, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._monotonic = monotonic
        #: when the others last heard of rank 0; None: they wait for nothing.
        self._heard_s: float | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides."""
        return self._ranks.rank == 0

    def decide(self, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns on rank 0; collective. Raises PeerLost."""
        if not self.leads:
            while (heard := self._ranks.exchange(None)[0]) == _WAIT:
                pass
            return heard
        self._heard_s = self._monotonic()
        try:
            decision = decide()
        finally:
            self._heard_s = None
        return self._ranks.exchange(decision)[0]

    def keep_waiting(self) -> None:
        """Tell the other ranks, now and then, that rank 0 is still deciding; raises PeerLost."""
        if self._heard_s is None or self._monotonic() - self._heard_s < _SIGN_OF_LIFE_S:
            return
        self._heard_s = self._monotonic()
        if self._ranks.size > 1:
            self._ranks.exchange(_WAIT)
