"""What signals mean to a daemon; the handlers of before are back at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger(__name__)


def outlive_hangups() -> None:
    """Pass by a SIGHUP that no daemon hears: while it starts, and while it is taken down.

    Not at a terminal, where it says that this is gone.
    """
    if not sys.stderr.isatty():
        # (no handler: the interpreter takes those away before the process ends)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def hearing_signals(
    stop: asyncio.Event, force: asyncio.Event, *, reload: Callable[[], None]
) -> Iterator[None]:
    """Let the first SIGTERM or SIGINT set ``stop``, the second ``force``; SIGHUP reloads.

    At a terminal SIGHUP says that it is gone, which is a SIGTERM.
    """
    loop = asyncio.get_running_loop()
    at_terminal = sys.stderr.isatty()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: signal.Signals) -> None:
        if number is signal.SIGHUP and not at_terminal:
            log.info("signal", name=number.name, effect="reload")
            reload()
            return
        again = stop.is_set()
        log.info("signal", name=number.name, effect="force" if again else "drain")
        (force if again else stop).set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
