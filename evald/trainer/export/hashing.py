"""xxh3-64 of a file on its way to the disk: beside the writing, or right behind it."""

from __future__ import annotations

import os
import queue
import threading

import xxhash


def new_hasher() -> Behind:
    """Return what costs the least time: a thread is worth it only where a processor is free."""
    return Beside() if os.getloadavg()[0] + 1 < (os.cpu_count() or 1) else Behind()


class Behind:
    """Hashes at once, while the piece is still in the cache of the processor that wrote it.

    A tenth of the writing's own time; a thread costs a third of it, and where no processor is free
    the writing waits for that. A file comes in pieces of ``piece_bytes``, each once it was written.
    """

    piece_bytes = 384 << 10

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """Hash the piece."""
        self._digest.update(piece)

    def finish(self) -> str:
        """Return the 16 hex digits."""
        return self._digest.hexdigest()


class Beside(Behind):
    """Hashes in a thread, which is three times as fast as the writing: pieces must not change."""

    #: so large that the thread is woken rarely.
    piece_bytes = 4 << 20

    def __init__(self) -> None:
        super().__init__()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(16)
        self._thread = threading.Thread(target=self._run, name="evald-hash", daemon=True)
        self._thread.start()

    def add(self, piece: memoryview) -> None:
        """Leave the piece to the thread."""
        self._pieces.put(piece)

    def finish(self) -> str:
        """Wait for the thread and return the 16 hex digits."""
        if self._thread.is_alive():
            self._pieces.put(None)
            self._thread.join()
        return super().finish()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)
