"""Wake everybody who waits for a change, without losing one in between."""

from __future__ import annotations

import asyncio


class Changes:
    """Waiters take a ``ticket`` first, look at the world, and then wait for a later change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all current waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def ticket(self) -> asyncio.Event:
        """Return the event of the next change."""
        return self._event

    @staticmethod
    async def wait(ticket: asyncio.Event, timeout_s: float) -> None:
        """Wait for the ticket's change, at most ``timeout_s`` (then look again)."""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await ticket.wait()
        except TimeoutError:
            return
