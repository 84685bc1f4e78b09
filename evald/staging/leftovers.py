"""What dead writers have left in an owned root: hidden names that nobody will ever publish.

The SDK writes into ``.tmp-NAME.XXXXXXXX`` and holds a lock on that directory. A job that was killed
and never comes back leaves gigabytes there, which no scan sees and no point accounts for.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from evald.staging.inside import own_folder, remove
from evald.staging.manifest import RUN_NAME

log = structlog.get_logger(__name__)

#: younger ones may be of a writer that holds no lock, or has not taken it yet.
MIN_AGE_S = 3600.0
_HIDDEN = re.compile(r"\.tmp-.+\.[0-9a-f]{8}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def sweep_leftovers(root: Path, trash: str, *, min_age_s: float = MIN_AGE_S) -> list[str]:
    """Delete them in the root and in the runs' folders; returns their names.

    ``trash``: folder below the root in which to delete. Blocks. What cannot be deleted stays, and
    is logged; raises OSError only for the root itself.
    """
    swept = []
    with own_folder(root, trash) as bin_:
        for folder, place in _folders(root):
            with os.scandir(folder) as found:
                names = [entry.name for entry in found if _HIDDEN.fullmatch(entry.name)]
            for name in names:
                try:
                    if _take(name, folder, bin_, min_age_s):
                        swept.append(f"{place}{name}")
                except FileNotFoundError:
                    continue  # published, or removed by its writer
                except OSError as error:
                    log.warning("leftover_not_deleted", name=name, error=str(error))
    for name in swept:
        log.info("leftover_deleted", name=name)
    return swept


def _folders(root: Path) -> Iterator[tuple[int, str]]:
    """Yield descriptors of the root and of each run's folder, open while they are looked at."""
    at = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        yield at, ""
        with os.scandir(at) as found:
            names = [entry.name for entry in found if RUN_NAME.fullmatch(entry.name)]
        for name in names:
            with suppress(OSError):  # a file, a link, or none of evald's business
                folder = os.open(name, _FOLDER, dir_fd=at)
                try:
                    yield folder, f"{name}/"
                finally:
                    os.close(folder)
    finally:
        os.close(at)


def _take(name: str, folder: int, trash: int, min_age_s: float) -> bool:
    """Delete one, if its writer is dead."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if time.time() - status.st_mtime < min_age_s:
        return False
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    with _unheld(name, folder) as held:
        if held is None or time.time() - _newest(held) < min_age_s:
            return False
        moved = f"{name}.{secrets.token_hex(8)}"
        os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=trash)
        remove(moved, trash)
    return True


@contextmanager
def _unheld(name: str, folder: int) -> Iterator[int | None]:
    """Lock a directory that nobody holds, while it is looked at; None: somebody does."""
    held = os.open(name, _FOLDER, dir_fd=folder)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system that cannot lock proves nothing
            yield None
        else:
            yield held
    finally:
        os.close(held)


def _newest(folder: int) -> float:
    """Return when something in an open folder was written last (its own names, one level)."""
    newest = os.fstat(folder).st_mtime
    with os.scandir(folder) as found:
        for entry in found:
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest
