"""What failed in an export, in the words of a skip."""

from __future__ import annotations

import errno
import re

from evald.errors import EvaldError
from evald.point import SkipReason
from evald.trainer.contract import ExportError
from evald.trainer.publish import StillEvaluating

_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")


def fault_of(error: BaseException, step: int) -> tuple[str, str]:
    """Return the skip's reason, and one sentence."""
    if isinstance(error, ExportError) and _REASON.fullmatch(error.reason):
        return error.reason, str(error)
    if isinstance(error, StillEvaluating):
        return SkipReason.BUSY, str(error)
    if isinstance(error, EvaldError):
        return SkipReason.EXPORT_FAILED, str(error)
    full = isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}
    reason = SkipReason.NO_SPACE if full else SkipReason.EXPORT_FAILED
    said = str(error) or "no further words"
    return reason, f"cannot export step {step}: {type(error).__name__}: {said}"
