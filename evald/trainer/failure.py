"""Why an export failed: told to the other ranks, and in the words of the step's skip."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from evald.errors import EvaldError
from evald.point import SkipReason
from evald.trainer.contract import ExportError, NoSpace, PeerLost
from evald.trainer.publish import NoRoom, StillEvaluating

_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
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
    if isinstance(error, NoRoom):
        return Failure(SkipReason.NO_SPACE, str(error))
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


def skip_of(error: BaseException, step: int) -> tuple[str, str]:
    """Return the reason of the skip that ``error`` leads to, and one sentence."""
    failure = failure_of(error)
    reason = failure.reason if _REASON.fullmatch(failure.reason) else SkipReason.EXPORT_FAILED
    return reason, str(error if isinstance(error, EvaldError) else failure.error(step))
