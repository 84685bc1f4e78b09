"""How late the event loop is: a ticker that measures itself."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Histogram

from evald.pulse import Pulse

TICK_S = 0.25
_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """Feeds a histogram while it runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "evald_event_loop_lag_seconds",
            f"How late a tick of {TICK_S:g} s came on the daemon's event loop.",
            registry=registry,
            buckets=_BUCKETS,
        )
        self.pulse = Pulse("loop lag")

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.pulse.beat()
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._histogram.observe(max(0.0, time.monotonic() - due_s))
