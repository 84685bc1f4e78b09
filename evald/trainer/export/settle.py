"""How the ranks of a job come to the same end of an export: all succeed, or all fail alike."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from evald.point import SkipReason
from evald.trainer.contract import ExportError, NoSpace, PeerLost, Ranks
from evald.trainer.publish import StillEvaluating

_FULL = {errno.ENOSPC, errno.EDQUOT}


class Failure(NamedTuple):
    """Why a rank cannot go on; small and picklable."""

    #: the skip's.
    reason: str
    #: a sentence without its beginning, "cannot export step N: ".
    cause: str
    is_lost_peer: bool = False

    def error(self, step: int, rank: int | None = None) -> ExportError:
        """Return the error that every rank raises; ``rank`` names the one that failed."""
        where = "" if rank is None else f"rank {rank}: "
        sentence = f"cannot export step {step}: {where}{self.cause}"
        if self.is_lost_peer:
            return PeerLost(sentence)
        if self.reason == SkipReason.NO_SPACE:
            return NoSpace(sentence)
        error = ExportError(sentence)
        error.reason = self.reason
        return error


def failure_of(error: BaseException) -> Failure:
    """Return what ``error`` means to the other ranks and to the record of the step."""
    if isinstance(error, ExportError):
        return Failure(error.reason, str(error), isinstance(error, PeerLost))
    if isinstance(error, StillEvaluating):
        return Failure(
            SkipReason.BUSY,
            "it was exported before, and evald has not ended the point of that snapshot in time; "
            "export it later",
        )
    if isinstance(error, OSError):
        where = error.filename or "a shard"
        if error.errno in _FULL:
            return Failure(
                SkipReason.NO_SPACE,
                f"the file system is full (at {where}); make room there, or lower staging.keep or "
                "dispatch.max_in_flight",
            )
        return Failure(SkipReason.EXPORT_FAILED, f"{where}: {error.strerror or error}")
    text = " ".join(str(error).split())
    return Failure(
        SkipReason.EXPORT_FAILED, f"{type(error).__name__}: {text}" if text else repr(error)
    )


def settle(ranks: Ranks, step: int, value: Any, failure: Failure | None) -> list[Any]:
    """Exchange ``value``, or why there is none; return the values in rank order.

    Collective, also for a rank that failed: nobody waits for it in vain. If one or more failed,
    every rank raises the error of the first of them. Raises PeerLost when a rank does not come.
    """
    try:
        outcomes = ranks.exchange((value, failure))
    except PeerLost as lost:
        told = failure_of(lost)
        if failure is not None:
            told = told._replace(cause=f"{told.cause}; on this rank: {failure.cause}")
        raise told.error(step) from lost
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise other.error(step, rank if ranks.size > 1 else None)
    return [outcome[0] for outcome in outcomes]
