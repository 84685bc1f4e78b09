"""What systemd is told: ready, status, reloading, stopping, and that all loops get on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evald.status.notify import notify
from evald.status.view import StatusView
from evald.status.watchdog import Watchdog
from evald.text import one_line

#: seconds between two words; sooner where systemd's watchdog wants it.
INTERVAL_S = 5.0
#: of an engine (or a black box) that has come up.
_READY = frozenset({"ready", "pinning", "serving", "draining", "idle", "evaluating"})


class Herald:
    """Speaks to the service manager; ``view`` gives the status that it shows to people.

    ``watchdog_s``: systemd's WatchdogSec, if it watches.
    """

    def __init__(
        self, view: Callable[[], StatusView], *, watchdog: Watchdog, watchdog_s: float | None
    ) -> None:
        self._view = view
        self._watchdog = watchdog
        self._is_ready = False
        self._interval_s = INTERVAL_S if watchdog_s is None else min(INTERVAL_S, watchdog_s / 4)

    async def run(self) -> None:
        """Say that all is ready, then how it goes, until cancelled."""
        self._is_ready = True
        notify(f"READY=1\nSTATUS={self._line()}")
        while True:
            stuck = self._watchdog.stuck()
            if stuck:
                notify(f"STATUS=stuck, {stuck}")
            else:
                notify(f"WATCHDOG=1\nSTATUS={self._line()}")
            await asyncio.sleep(self._interval_s)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Say so, and afterwards that it is over, however it went."""
        if not self._is_ready:  # it has not begun yet
            yield
            return
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}\nSTATUS=reloading")
        try:
            yield
        finally:
            notify(f"READY=1\nSTATUS={self._line()}")

    def stopping(self, within_s: float) -> None:
        """Say that it stops, which may take ``within_s`` whatever TimeoutStopSec is."""
        notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_s * 1e6)}\nSTATUS={self._line()}")

    def _line(self) -> str:
        return status_line(self._view())


def status_line(view: StatusView) -> str:
    """Return the status as one line: what `systemctl status` shows."""
    up = sum(engine.state in _READY for engine in view.engines)
    others = Counter(engine.state for engine in view.engines if engine.state not in _READY)
    engines = [f"{up} of {len(view.engines)} engines ready"]
    engines += [f"{count} {state}" for state, count in others.items()]
    said = [
        f"{view.state} ({view.not_written})" if view.not_written else view.state,
        ", ".join(engines),
        f"{len(view.running)} running, {len(view.queued)} queued",
        *([view.config_fault] if view.config_fault else []),
    ]
    return one_line("; ".join(said))
