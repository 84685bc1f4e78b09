"""The ledger of a daemon that is asked over TCP, read as a file's is."""

from __future__ import annotations

import asyncio

from evald.status.client import NoAnswer, NotRunning, Remote, fetch_records
from evald.status.pages import seq_of

#: the daemon answers that late when there is nothing new.
WAIT_S = 0.5


class RemoteLedger:
    """Reads the records that were added since the last call; blocking, for one thread.

    A daemon that does not answer has no new records: ``fault`` says so until it answers again. A
    ledger whose newest ``seq`` is below what was read already is another one: it is read from its
    start, and ``restarts`` goes up.
    """

    def __init__(self, remote: Remote, *, after: int = 0) -> None:
        self.path = f"{remote}/records"
        self.restarts = 0
        #: one sentence while the daemon does not answer.
        self.fault = ""
        self._remote = remote
        self._after = after
        #: the newest seq that the daemon has told.
        self._known = 0

    def read(self, *, wait_s: float = WAIT_S) -> list[bytes]:
        """Return all new lines, after ``wait_s`` if there is none.

        Raises EvaldError when the daemon refuses the token.
        """
        return asyncio.run(self._read(wait_s))

    async def _read(self, wait_s: float) -> list[bytes]:
        lines: list[bytes] = []
        try:
            while page := await self._page(0.0 if lines else wait_s):
                lines += page
                if self._after >= self._known:
                    break
        except (NotRunning, NoAnswer) as error:
            self.fault = str(error)
        else:
            self.fault = ""
        return lines

    async def _page(self, wait_s: float) -> list[bytes]:
        lines, newest = await fetch_records(self._remote, self._after, wait_s=wait_s)
        if newest < self._known:
            self.restarts += 1
            self._after = self._known = 0
            return []
        self._known = newest
        if lines:
            self._after = seq_of(lines[-1]) or newest
        return lines
