"""The notice board in the staging root: the status as a file, for trainers that share only that."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from evald.config import Config
from evald.pulse import Pulse
from evald.results.modes import Modes
from evald.staging.inside import folder_of, remove
from evald.status.view import StatusView
from evald.text import encode_json

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def board_path(config: Config) -> Path:
    """Return where the status is written: in an owned root, else beside the results."""
    if config.staging.owned:
        return Path(config.staging.root) / ".evald" / "status.json"
    return Path(config.results.dir) / "status.json"


class Board:
    """Writes the status once a second by atomic replace; readers see its ``beat`` go up.

    A write that fails (the root was removed, tmpfs is full) costs a beat, never the daemon; what
    somebody has put in its way (a pipe, a directory, a link) is removed.
    """

    def __init__(self, config: Config, *, view: Callable[[], StatusView]) -> None:
        """``view`` gives the status with its next ``beat``."""
        self.path = board_path(config)
        staging = config.staging
        self._root = Path(staging.root if staging.owned else config.results.dir)
        self._view = view
        #: the trainer, often another user, must be able to read it in any case
        self._modes = Modes(dir_mode=0o755, file_mode=0o644)
        self._fault = ""
        self.pulse = Pulse("status")

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self.pulse.beat()
            content = encode_json(self._view()) + b"\n"
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
        fresh = f".{self.path.name}.new"
        # by descriptors: others may write into the root, and what they put here is not followed
        with folder_of(self._root, self.path) as (folder, name):
            remove(fresh, folder)
            descriptor = os.open(fresh, _FRESH, self._modes.file_mode, dir_fd=folder)
            try:
                os.fchmod(descriptor, self._modes.file_mode)
                if os.write(descriptor, content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
            try:
                os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
            except IsADirectoryError:
                remove(name, folder)
                os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
