"""Who is writing into a directory: a lock on it, which ends with its process."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


def lock(directory: Path, *, certain: bool = False) -> int | None:
    """Open a directory and lock it; None when another process holds it.

    Where the file system cannot lock directories (NFS) it is open and not locked, or, with
    ``certain``, None as well. Raises OSError for what is no directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if certain or isinstance(error, BlockingIOError):
            os.close(descriptor)
            return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Let go of what ``lock`` returned."""
    if descriptor is not None:
        with suppress(OSError):  # a process that was forked meanwhile must not hold it any longer
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_open(directory: Path, descriptor: int) -> bool:
    """Tell whether ``descriptor`` is what now has the name ``directory``."""
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except OSError:
        return False


def remove_unheld(path: Path, aside: Path, *, certain: bool = False) -> None:
    """Remove what a killed export has left, by way of ``aside``; not what is being written.

    ``certain``: only where a lock proves that nobody writes.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):  # it has got its other name, or somebody has removed it
        held = lock(path, certain=certain)
        try:
            if held is not None and is_open(path, held):
                shutil.rmtree(path.rename(aside))
        finally:
            unlock(held)
