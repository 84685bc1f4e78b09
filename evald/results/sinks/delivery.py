"""Drives a ledger's rows into sinks: resumes, tries again within bounds, and never loses a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evald.errors import EvaldError
from evald.results.sinks.contract import Sink, SinkFault
from evald.results.sinks.cursor import Cursor
from evald.results.sinks.reading import Reading
from evald.results.sinks.source import Source

POLL_S = 1.0
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0


class Stopped(Exception):  # no error: somebody has asked for it
    """The reader is to end now."""


class Delivery:
    """Delivers the rows of ``source``, each run's into a sink of its own.

    ``make``: makes the sink of a run. ``say``: takes one sentence for people. ``patience_s``: how
    long a sink that does not work is tried again. ``stop`` ends it between two calls of a sink.
    Blocking, for one thread.
    """

    def __init__(
        self,
        source: Source,
        make: Callable[[str], Sink],
        *,
        run: str | None,
        say: Callable[[str], None],
        stop: threading.Event,
        patience_s: float,
        poll_s: float = POLL_S,
    ) -> None:
        self._source = source
        self._make = make
        self._say = say
        self._stop = stop
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._sinks: dict[str, Sink] = {}
        self._reading = Reading(
            source,
            run=run,
            cursor_of=self._cursor_of,
            on_other=self._forget,
            on_restart=self._begin_again,
        )
        #: rows that were delivered by this life.
        self.n_rows = 0

    def run(self, *, once: bool) -> None:
        """Deliver until ``stop`` is set; ``once``: what is there now.

        Raises EvaldError when a sink has not worked for ``patience_s``, or cannot work: the next
        life goes on where this one stopped.
        """
        said = ""
        try:
            while not self._stop.is_set():
                self._pass()
                if self._source.fault and not said:
                    self._say(self._source.fault)
                said = self._source.fault
                if once:
                    if said:
                        raise EvaldError(f"{said}; what it had told was delivered")
                    break
                self._stop.wait(self._poll_s)
        except Stopped:
            pass
        finally:
            self._close()

    def _pass(self) -> None:
        """Deliver what is new."""
        try:
            for pairs in self._reading.new():
                for row, is_known in pairs:
                    sink = self._sinks[row.run]
                    if is_known:
                        sink.known(row)
                    else:
                        sink.take(row)
                        self.n_rows += 1
                for run in {row.run for row, _ in pairs}:
                    self._insist(self._sinks[run].flush)
        except OSError as error:
            raise EvaldError(
                f"cannot read {self._source.name}: {error.strerror or error}"
            ) from error
        for run in self._reading.over:
            if run in self._sinks:
                self._insist(self._sinks[run].close)

    def _cursor_of(self, run: str) -> Cursor | None:
        self._sinks[run] = self._make(run)
        return self._sinks[run].cursor()

    def _forget(self, run: str) -> None:
        self._say(
            f"{self._source.name} is not the ledger that {self._sinks[run].target} has rows of: "
            "all of it is delivered"
        )
        self._sinks[run].forget()

    def _insist(self, act: Callable[[], None]) -> None:
        """Call a sink until it works; says once that it does not, and once that it does again."""
        since_s = time.monotonic()
        delay_s = _FIRST_DELAY_S
        failed = False
        while True:
            try:
                act()
            except SinkFault as error:
                left_s = since_s + self._patience_s - time.monotonic()
                if left_s <= 0:
                    raise
                if not failed:
                    failed = True
                    self._say(f"{error}; trying again for {self._patience_s:.0f} s at most")
                if self._stop.wait(min(delay_s, left_s)):
                    raise Stopped from error
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            else:
                if failed:
                    self._say("that works again; nothing was lost")
                return

    def _begin_again(self) -> None:
        """Let go of all sinks: the source begins again, and so they are made anew."""
        for sink in self._sinks.values():
            self._insist(sink.close)
        self._sinks.clear()

    def _close(self) -> None:
        """Close every sink, also when one of them cannot be."""
        fault: EvaldError | None = None
        for sink in self._sinks.values():
            try:
                sink.close()
            except EvaldError as error:
                fault = error
        if fault is not None:
            raise fault
