"""The file that the ledger appends to: whole lines or nothing, closed once it is large."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from evald.errors import LedgerError
from evald.results.modes import Modes, sync_dir
from evald.results.segments import segment_path
from evald.results.seq_mark import SeqMark

log = structlog.get_logger(__name__)


class _Attempt(msgspec.Struct, frozen=True):
    """A line whose write has begun at ``offset``, and is not known to have succeeded."""

    offset: int
    line: bytes


class LedgerFile:
    """Appends lines; a file of ``rotate_bytes`` (0: never) is closed before the next line.

    A line counts once ``append`` has returned. What a failed write has left is taken away, at once
    if that can be done and else before the next line; so a fault can be waited out. ``mark`` is
    told each ``seq``. Blocking; threads may take turns.
    """

    def __init__(self, path: Path, modes: Modes, *, rotate_bytes: int, mark: SeqMark) -> None:
        """Open or create it; raises OSError."""
        self.path = path
        self._modes = modes
        self._rotate_bytes = rotate_bytes
        self._mark = mark
        #: seq of the first line of the file; 0 while that is not known, or there is none.
        self.first_seq = 0
        self._closed = False
        self._attempt: _Attempt | None = None
        #: bytes of it, as this writer has left them.
        self._size = 0
        #: held while a thread uses the descriptor, so that close() cannot pull it away.
        self._in_use = threading.Lock()
        self._descriptor = -1
        self._open()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be appended any more."""
        return self._closed

    def close(self) -> None:
        """Wait for a write under way, then close."""
        with self._in_use:
            self._closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def append(self, line: bytes, seq: int, *, durable: bool) -> None:
        """Append the ``line`` with this ``seq``; ``durable``: and wait for the disk.

        Raises OSError, and then the line does not count and the same one may be tried again.
        Raises LedgerError when somebody else has moved, replaced or written to the file.
        """
        with self._in_use:
            if self._closed:
                raise LedgerError(f"cannot append to {self.path}: the ledger is closed")
            if self._descriptor < 0:
                self._open()
            self._check_ours()
            self._take_back()
            self._check_untouched()
            if self._size and 0 < self._rotate_bytes <= self._size:
                self._rotate(seq - 1)
            self._attempt = _Attempt(self._size, line)
            try:
                self._write(line, durable=durable)
            except OSError:
                # what is known of a page whose write has failed is nothing: the line goes, and is
                # written anew (no reader takes half a line; a whole one is the same again)
                with suppress(OSError, LedgerError):
                    self._take_back()
                raise
            self._attempt = None
            self._size += len(line)
            self.first_seq = self.first_seq or seq
            self._mark.note(seq)

    def _write(self, line: bytes, *, durable: bool) -> None:
        if os.write(self._descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if durable:
            os.fdatasync(self._descriptor)

    def cut(self, count: int) -> None:
        """Cut the last ``count`` bytes off, durably; raises OSError."""
        os.ftruncate(self._descriptor, self._size - count)
        self._size -= count
        os.fsync(self._descriptor)

    def _open(self) -> None:
        descriptor = self._modes.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            sync_dir(self.path.parent)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, os.fstat(descriptor).st_size

    def _check_ours(self) -> None:
        here = os.fstat(self._descriptor)
        try:
            there = self.path.stat()
        except FileNotFoundError as fault:
            raise LedgerError(
                f"cannot append to {self.path}: it was moved away while evald writes to it; "
                "move it back and restart the daemon"
            ) from fault
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            raise LedgerError(
                f"cannot append to {self.path}: the file was replaced by another one while evald "
                "writes to it; restart the daemon, it goes on from what is really there"
            )

    def _check_untouched(self) -> None:
        """Raise LedgerError for a file that ends elsewhere: a line behind half a line is lost."""
        if os.fstat(self._descriptor).st_size != self._size:
            raise LedgerError(
                f"cannot append to {self.path}: somebody else has cut it or written to it; restart "
                "the daemon, it goes on from what is really there"
            )

    def _take_back(self) -> None:
        """Remove what a failed attempt has left. Raises OSError: it may still be there."""
        attempt = self._attempt
        if attempt is None:
            return
        size = os.fstat(self._descriptor).st_size
        left = os.pread(self._descriptor, len(attempt.line) + 1, attempt.offset)
        if size < attempt.offset or not attempt.line.startswith(left):
            raise LedgerError(
                f"cannot append to {self.path}: its end is not what evald has written, after a "
                "write that failed; restart the daemon, it goes on from what is really there"
            )
        if left:
            os.ftruncate(self._descriptor, attempt.offset)
        self._attempt = None

    def _rotate(self, last_seq: int) -> None:
        """Close the file under its segment's name and begin the next one; raises OSError.

        A daemon that is killed between the two finds no file at its next start, and makes one.
        """
        # what follows waits for the disk alone, and stands for all before it
        os.fdatasync(self._descriptor)
        closed = segment_path(self.path, self.first_seq, last_seq)
        self.path.rename(closed)
        os.close(self._descriptor)
        self._descriptor, self.first_seq = -1, 0
        log.info("ledger_rotated", closed=str(closed))
        self._open()
