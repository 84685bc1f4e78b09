"""A lock that the kernel drops with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os

#: the pid's line; what lies behind it is the holder's own.
PID_BYTES = 16


def hold(descriptor: int) -> str | None:
    """Lock an open file and write our pid into it; None, or the pid of who holds it already.

    Raises OSError where the file system knows no locks, or the pid cannot be written; on a full
    disk nobody is told it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(descriptor, PID_BYTES, 0).decode(errors="replace")
        return said.partition("\n")[0].strip() or "unknown"
    try:
        os.pwrite(descriptor, b"%-*d\n" % (PID_BYTES - 1, os.getpid()), 0)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
    return None


def hold_or_close(descriptor: int) -> str | None:
    """Do the same, and close the file unless it is locked now. Raises OSError."""
    holder: str | None = ""
    try:
        holder = hold(descriptor)
    finally:
        if holder is not None:
            os.close(descriptor)
    return holder
