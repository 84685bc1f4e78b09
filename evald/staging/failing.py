"""A file system that fails for a moment: the snapshot is not to blame before it has had some time.

A network mount that is taken over, or a disk that answers late, gives EIO or ESTALE once and the
right bytes a second later. ``invalid_snapshot`` is for ever: so reading is tried again first.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

from evald.errors import EvalSkip

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: what says nothing about the file itself.
_PASSING = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN, errno.EAGAIN, errno.EINTR),
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    }
)
#: a snapshot is blamed once so many looks have failed, over at least so many seconds.
_LOOKS = 3
_SECONDS = 10.0
#: between two tries where nobody looks again by himself.
_PAUSES_S = (2.0, 3.0, 5.0)


def fails_for_now(error: BaseException | None) -> bool:
    """Tell whether an error comes of a file system that may work again in a moment."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno in _PASSING
        error = error.__cause__
    return False


async def patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Return what ``read`` returns; while the file system fails, it is tried again: three times."""
    for pause_s in _PAUSES_S:
        try:
            return await read()
        except EvalSkip as skip:
            if not fails_for_now(skip):
                raise
            log.warning("snapshot_read_failed", detail=skip.detail)
        await asyncio.sleep(pause_s)
    return await read()


class FailingReads:
    """Counts failed looks at directories that are looked at with every scan."""

    def __init__(self) -> None:
        #: directory -> failed looks in a row, and the time of the first.
        self._failed: dict[Path, tuple[int, float]] = {}

    def is_lasting(self, directory: Path, detail: str) -> bool:
        """Note that reading ``directory`` has failed; tell whether it has for long enough."""
        now = time.monotonic()
        looks, since = self._failed.get(directory, (0, now))
        self._failed[directory] = looks + 1, since
        log.warning("snapshot_read_failed", detail=detail)
        return looks + 1 >= _LOOKS and now - since >= _SECONDS

    def forget(self, directory: Path) -> None:
        """Note that reading it has not failed."""
        self._failed.pop(directory, None)
