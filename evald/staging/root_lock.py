"""One daemon for each owned root: two would delete each other's snapshots."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from evald.errors import EvaldError
from evald.file_lock import hold

log = structlog.get_logger(__name__)

_NAME = "lock"


class RootLock:
    """Held on ``ROOT/.evald/lock`` until :meth:`close`, or until the process ends."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor = -1

    def take(self) -> None:
        """Take it; raises EvaldError when another daemon has it.

        A file system that knows no locks is used without: it is told and costs nothing else.
        """
        folder = self._root / ".evald"
        try:
            folder.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / _NAME, flags, 0o644)
        except OSError as error:
            log.warning("staging_root_not_locked", root=str(self._root), error=str(error))
            return
        holder = None
        try:
            holder = hold(descriptor)
        except OSError as error:
            log.warning("staging_root_not_locked", root=str(self._root), error=str(error))
        if holder is not None:
            os.close(descriptor)
            raise EvaldError(
                f"cannot use staging root {self._root}: another evald (pid {holder}) deletes ended "
                "snapshots in it; stop it, choose another staging.root, or set staging.owned = "
                "false in both"
            )
        self._descriptor = descriptor

    def close(self) -> None:
        """Give it up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
