"""Where a watcher's picture comes from: a daemon that may go away and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from evald.errors import EvaldError
from evald.status.client import Door, fetch_records, fetch_status
from evald.status.pages import seq_of
from evald.status.terminal.layout import Shown
from evald.status.terminal.recent import FIRST_LOOK, Recent
from evald.status.view import StatusView

TIMEOUT_S = 5.0


class Source:
    """Asks the daemon; what was answered last stays while it does not answer.

    ``find`` gives the daemon's door; blocking, it raises EvaldError. It is asked again after every
    failure: a daemon that was restarted may have another socket.
    """

    def __init__(self, find: Callable[[], Door]) -> None:
        self._find = find
        self._door: Door | None = None
        self._recent = Recent()
        #: what of the ledger was read, and of which one.
        self._seq: int | None = None
        self._results = ""
        self.shown: Shown | None = None
        #: why there is no fresh answer; empty while there is one.
        self.fault = ""
        self._since_s = 0.0

    @property
    def fault_s(self) -> float:
        """Seconds since the last answer, while there is a fault."""
        return time.monotonic() - self._since_s

    async def refresh(self) -> Shown:
        """Ask once; raises EvaldError (and NotRunning) when it was not answered."""
        try:
            if self._door is None:
                self._door = await asyncio.to_thread(self._find)
            view = await fetch_status(self._door, timeout_s=TIMEOUT_S)
            await self._read_records(self._door, view)
        except EvaldError as error:
            self._door = None
            self.fault = str(error)
            raise
        self.fault, self._since_s = "", time.monotonic()
        points, alerts = self._recent.points(), self._recent.alerts()
        self.shown = Shown(view=view, points=points, alerts=alerts)
        return self.shown

    async def _read_records(self, door: Door, view: StatusView) -> None:
        """Read what is new in the ledger; of a ledger that is new, the end."""
        if self._seq is None or view.last_seq < self._seq or view.results != self._results:
            self._recent = Recent()
            self._seq, self._results = max(view.last_seq - FIRST_LOOK, 0), view.results
        while self._seq < view.last_seq:
            lines, newest = await fetch_records(door, self._seq, timeout_s=TIMEOUT_S)
            if not lines or newest < self._seq:  # another ledger, or cut away: next time
                self._seq = None
                return
            self._recent.take(lines)
            self._seq = seq_of(lines[-1]) or newest
