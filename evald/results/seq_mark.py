"""The newest ``seq``, noted where it outlives the ledger's files: behind the pid in the lock file.

Somebody may move all files away, to begin anew or to make room: readers still know what they held,
and would take a record with a ``seq`` of theirs for one that they have read.
"""

from __future__ import annotations

import os
from contextlib import suppress

from evald.file_lock import PID_BYTES

_DIGITS = 20


class SeqMark:
    """The mark in the open lock file ``descriptor``; methods block for one system call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def note(self, seq: int) -> None:
        """Note the ``seq`` of a line that is written."""
        with suppress(OSError):  # no room for it: the line itself has found some
            os.pwrite(self._descriptor, b"%-*d\n" % (_DIGITS, seq), PID_BYTES)

    def read(self) -> int:
        """Return what was noted last, 0 without; raises OSError."""
        noted = os.pread(self._descriptor, _DIGITS, PID_BYTES).strip()
        return int(noted) if noted.isdigit() else 0
