"""The directory of a sink: its cursor, a lock against a second reader, and what its faults mean."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from evald.errors import EvaldError
from evald.file_lock import hold_or_close
from evald.results.sinks import cursor as cursors
from evald.results.sinks.contract import SinkFault
from evald.results.sinks.cursor import Cursor

_HOPELESS = frozenset({errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EPERM, errno.EISDIR})


class Place:
    """Keeps a cursor at ``path``; nobody else does while this is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    def hold(self) -> None:
        """Keep other readers out; raises OSError, and EvaldError naming who is in."""
        if self._lock >= 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if (holder := hold_or_close(lock)) is not None:
            raise EvaldError(
                f"cannot deliver into {self._path.parent}: process {holder} does already; stop it, "
                "or name another --dir"
            )
        self._lock = lock

    def load(self) -> Cursor | None:
        """Return the cursor; raises OSError, and EvaldError for what is none."""
        return cursors.load(self._path)

    def store(self, cursor: Cursor) -> None:
        """Replace the cursor; raises OSError."""
        cursors.store(self._path, cursor)

    def release(self) -> None:
        """Let others in."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def fault(self, error: OSError) -> EvaldError:
        """Say what an error means: a SinkFault may pass."""
        sentence = f"cannot deliver into {self._path.parent}: {error.strerror or error}"
        if error.errno in _HOPELESS:
            return EvaldError(f"{sentence}; name another --dir, or change its rights")
        return SinkFault(sentence)
