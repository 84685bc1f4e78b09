"""How full the staging root is, and whether another snapshot may stay in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container
from pathlib import Path

from evald.config import Staging
from evald.status.view import StagingView


class Room:
    """Counts the snapshots that a scan has seen and that were delivered, in their order.

    So the budget's last bytes are of the oldest snapshot, not of one behind it.
    """

    def __init__(self, config: Staging) -> None:
        self._config = config
        self._sizes: dict[Path, int] = {}
        #: of the root's file system, by the last scan; before the first one, of where it will be:
        #: a trainer that asks a daemon that has just started must not be told that all is full.
        root = Path(config.root)
        known = (_free_bytes(str(place)) for place in (root, *root.parents))
        self.free_bytes = next((free for free in known if free is not None), 0)
        #: its size; 0: not scanned yet, or away.
        self.total_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all counted snapshots."""
        return sum(self._sizes.values())

    def count(self, directory: Path, size_bytes: int) -> None:
        """Count a snapshot from now on."""
        self._sizes[directory] = size_bytes

    def keep(self, marked: Container[Path]) -> None:
        """Forget all that the newest scan did not see."""
        self._forget([directory for directory in self._sizes if directory not in marked])

    def view(self, snapshots: int) -> StagingView:
        """Show it."""
        return StagingView(
            root=self._config.root,
            used_bytes=self.used_bytes,
            free_bytes=self.free_bytes,
            total_bytes=self.total_bytes,
            snapshots=snapshots,
            max_bytes=self._config.max_bytes,
            min_free_bytes=self._config.min_free_bytes,
            pattern=self._config.pattern,
            marker=self._config.marker,
        )

    async def shortage(self) -> str | None:
        """Say in one sentence why the newest snapshot cannot stay; None: it can."""
        most, least = self._config.max_bytes, self._config.min_free_bytes
        if most is not None and self.used_bytes > most:
            # what was deleted since the last scan takes no room any more
            self._forget(await asyncio.to_thread(_gone, list(self._sizes)))
            if (used := self.used_bytes) > most:
                return (
                    f"snapshots in the staging root take {used} bytes, over staging.max_bytes = "
                    f"{most}; raise it, or lower keep or max_in_flight"
                )
        if least:
            free = await asyncio.to_thread(_free_bytes, self._config.root)
            if free is not None and free < least:
                return (
                    f"the file system of the staging root has {free} bytes free, under "
                    f"staging.min_free_bytes = {least}; make room there, or lower keep or "
                    "max_in_flight"
                )
        return None

    def _forget(self, directories: list[Path]) -> None:
        for directory in directories:
            self._sizes.pop(directory, None)


def _gone(directories: list[Path]) -> list[Path]:
    return [path for path in directories if not os.path.lexists(path)]


def _free_bytes(root: str) -> int | None:
    try:
        disk = os.statvfs(root)
    except OSError:
        return None  # the scan says that the root is away
    return disk.f_bavail * disk.f_frsize
