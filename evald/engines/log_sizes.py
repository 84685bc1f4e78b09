"""The log of a process that lives for weeks: once it is long, its older part goes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from evald.pulse import Pulse

log = structlog.get_logger(__name__)

#: seconds between two looks.
LOOK_S = 60.0
#: a longer log is cut to its end, so much of it.
MAX_BYTES = 64 << 20
KEEP_BYTES = 8 << 20
#: one look, at all of them.
_SHORTEN_S = 300.0

#: of the directories beside samples/, those of processes.
_WITH_LOGS = ("engines", "blackbox", "functions")

CUT = b"(evald has cut off what was older)\n"


class LogSizes:
    """Looks after all logs in the results ``directory``."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self.pulse = Pulse("logs", clock=clock)

    async def run(self) -> None:
        """Look each minute, until cancelled."""
        while True:
            self.pulse.rest("looking, or waiting for the next look", LOOK_S + _SHORTEN_S)
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(shorten_all, self._directory)
            except OSError as error:
                log.warning("logs_not_shortened", error=str(error))


def shorten_all(directory: Path) -> None:
    """Cut each log that is too long. Blocks; raises OSError."""
    for name in _WITH_LOGS:
        for path in (directory / name).rglob("*.log"):
            if path.lstat().st_size > MAX_BYTES:
                shorten(path)


def shorten(path: Path) -> None:
    """Leave the end of a log. Its process appends to it meanwhile: a line of it may be lost."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        _, _, end = os.pread(descriptor, KEEP_BYTES, max(size - KEEP_BYTES, 0)).partition(b"\n")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, CUT + end)
    finally:
        os.close(descriptor)
    log.info("log_shortened", path=str(path), bytes=size)
