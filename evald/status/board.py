"""The notice board in the staging root: the status as a file, for trainers that share only that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from evald.config import Config
from evald.results.modes import Modes
from evald.status.view import StatusView
from evald.text import encode_json

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0


def board_path(config: Config) -> Path:
    """Return where the status is written: in an owned root, else beside the results."""
    if config.staging.owned:
        return Path(config.staging.root) / ".evald" / "status.json"
    return Path(config.results.dir) / "status.json"


class Board:
    """Writes the status once a second by atomic replace; readers see its ``beat`` go up.

    A write that fails (the root was removed, tmpfs is full) costs a beat, never the daemon.
    """

    def __init__(self, config: Config, *, view: Callable[[], StatusView]) -> None:
        """``view`` gives the status with its next ``beat``."""
        self.path = board_path(config)
        self._view = view
        #: the trainer, often another user, must be able to read it in any case
        self._modes = Modes(dir_mode=0o755, file_mode=0o644)
        self._fault = ""

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            content = encode_json(self._view())
            try:
                await asyncio.to_thread(self._write, content)
            except OSError as error:
                if str(error) != self._fault:  # a lasting fault is told once
                    log.warning("board_not_written", path=str(self.path), error=str(error))
                self._fault = str(error)
            else:
                self._fault = ""
            await asyncio.sleep(INTERVAL_S)

    def _write(self, content: bytes) -> None:
        directory = self.path.parent
        if not directory.is_dir() and directory.parent.is_dir():
            self._modes.make_dirs(directory)  # never the root itself: that is staging's
        fresh = self.path.with_name(f".{self.path.name}.new")
        # not blocking: whatever lies there, a pipe without reader must not hold the daemon
        descriptor = self._modes.open(fresh, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
        try:
            os.write(descriptor, content + b"\n")
        finally:
            os.close(descriptor)
        fresh.replace(self.path)
