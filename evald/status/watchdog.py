"""Whether every loop of the daemon gets on: only then systemd's watchdog is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from evald.pulse import Pulse

log = structlog.get_logger(__name__)

#: for loops that promise nothing else, where no systemd asks; then it is half of WatchdogSec.
DEFAULT_WITHIN_S = 60.0
_MICROSECONDS = 1e6


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return what systemd's WatchdogSec is; None: it does not watch this process."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or int(text) == 0 or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(text) / _MICROSECONDS


class Watchdog:
    """Looks at all ``pulses``; ``excuse`` says why all of them may stand still, if they may.

    ``within_s``: how soon a loop must mark progress that has not said how long it takes.
    """

    def __init__(
        self,
        pulses: Callable[[], Iterable[Pulse]],
        *,
        excuse: Callable[[], str],
        within_s: float = DEFAULT_WITHIN_S,
    ) -> None:
        self._pulses = pulses
        self._excuse = excuse
        self._within_s = within_s
        self._told = ""

    def stuck(self) -> str:
        """Name the loops that stand still; empty while all get on. It is logged, once."""
        pulses = list(self._pulses())
        if self._excuse():
            for pulse in pulses:
                pulse.begin_again()
        late = [(pulse.name, pulse.overdue(self._within_s)) for pulse in pulses]
        names = ", ".join(name for name, fault in late if fault)
        if names != self._told:
            self._told = names
            if names:
                log.error("loop_stuck", detail="; ".join(fault for _, fault in late if fault))
            else:
                log.info("loop_goes_on")
        return "; ".join(fault for _, fault in late if fault)
