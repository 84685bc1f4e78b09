"""What the parts of the training side have in common: plain types, errors and three protocols.

Nothing here imports torch: the dispatcher's rules, and a job whose trainer saves its own
checkpoints, do without it.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Protocol

from evald.errors import EvaldError
from evald.point import SkipReason
from evald.status.view import StatusView


class ExportError(EvaldError):
    """A snapshot was not published; nothing of it is left. ``reason`` is the skip's."""

    reason: str = SkipReason.EXPORT_FAILED


class NoSpace(ExportError):
    """The file system is full, or would be."""

    reason = SkipReason.NO_SPACE


class PushError(ExportError):
    """A snapshot did not arrive at the far end within its deadline, or not as it left."""


class PeerLost(ExportError):
    """Another process of the job did not come to the exchange in time, or died."""


class Ranks(Protocol):
    """The processes of one training job, which make the SDK's collective calls together."""

    #: 0 publishes and speaks to the daemon.
    rank: int
    size: int
    #: ranks that see the same file system as rank 0, itself included: only these write.
    near: tuple[int, ...]

    def exchange(self, value: Any) -> list[Any]:
        """Gather one small picklable value of each rank, in rank order, on every rank.

        Also the barrier. Raises PeerLost within the deadline given at construction.
        """
        ...


class Alone:
    """A job of one process."""

    rank = 0
    size = 1
    near: tuple[int, ...] = (0,)

    def exchange(self, value: Any) -> list[Any]:
        """Return the own value."""
        return [value]


class Link(Protocol):
    """How a training job asks the daemon. Blocking; a daemon that is not there is no error.

    Each call ends within the link's own timeout (a few seconds), so that training never stalls.
    """

    #: goes up when another ledger has taken the place of the one that was read: begin again at 0.
    restarts: int

    @property
    def where(self) -> str:
        """Where a status is looked for, for people."""
        ...

    def status(self) -> StatusView | None:
        """Return the newest status, however old (compare ``beat``); None when there is none."""
        ...

    def records(self, after: int) -> list[dict[str, Any]]:
        """Return records with ``seq`` above ``after``, oldest first, as many as it likes.

        [] if there are none, or while ``restarts`` goes up.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class Carrier(Protocol):
    """Brings what was published in a local root to the eval node's root."""

    def carry(self, path: Path) -> None:
        """Copy a published snapshot directory, or a word of the trainer, and check it there.

        Blocking. ``path`` lies below the local root; it keeps its name. The marker comes last.
        Raises PushError (NoSpace where the far end is full); a later call resumes.
        """
        ...


def trace_of(error: Exception) -> str:
    """Return a traceback as text: a logger that shows local variables would show tokens."""
    return "".join(traceback.format_exception(error))
