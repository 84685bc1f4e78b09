"""How much room the results have left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from evald.pulse import Pulse
from evald.results.sample_store import SampleStore
from evald.status.view import DiskView

#: seconds between two looks.
LOOK_S = 10.0
#: one look, on a slow file system.
_STATVFS_S = 300.0


class Disk:
    """Looks at the file system of the results, which may hang: never on the event loop."""

    def __init__(self, directory: Path, samples: SampleStore) -> None:
        self._directory = directory
        self._samples = samples
        #: (free, total) bytes; None: not known.
        self._room: tuple[int, int] | None = None
        self.pulse = Pulse("disk")

    async def run(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            self.pulse.rest("looking, or waiting for the next look", LOOK_S + _STATVFS_S)
            self._room = await asyncio.to_thread(_room, self._directory)
            await asyncio.sleep(LOOK_S)

    def view(self) -> DiskView | None:
        """Show it as it was at the last look."""
        if self._room is None:
            return None
        free, total = self._room
        return DiskView(
            results_free_bytes=free,
            results_total_bytes=total,
            samples_bytes=self._samples.stored_bytes,
        )


def _room(directory: Path) -> tuple[int, int] | None:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None  # the ledger, which cannot be written then, says why
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
