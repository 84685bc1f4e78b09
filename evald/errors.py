"""Every error that evald raises on purpose: one root, and a leaf only where a caller branches.

Messages read "cannot <verb> <object>: <cause>", then what to do.
"""

from __future__ import annotations

#: exit code of a bad config (sysexits.h EX_CONFIG); systemd does not restart on it.
EXIT_CONFIG = 78


class EvaldError(Exception):
    """Root of all errors that evald raises on purpose."""


class ConfigError(EvaldError):
    """The config cannot be used; ``problems`` holds one sentence for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class LedgerError(EvaldError):
    """The ledger cannot be opened, locked or written."""


class GenerationFailed(EvaldError):
    """One request could not be answered; it is the samples' fault or time ran out.

    ``kind`` is ``"timeout"`` (no answer within the sample's deadline), ``"rejected"`` (the
    server refused this request: 4xx) or ``"error"`` (retries on every verified engine failed).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class EvalSkip(EvaldError):
    """The point ends ``skipped`` with this reason; raised by any stage, caught in one place."""

    reason: str = "crashed"

    def __init__(self, detail: str, *, reason: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if reason is not None:
            self.reason = reason


class InvalidSnapshot(EvalSkip):
    """The snapshot is not one that an engine may see."""

    reason = "invalid_snapshot"


class SnapshotGone(EvalSkip):
    """The snapshot's directory or marker vanished before the pin."""

    reason = "ckpt_missing"


class Superseded(EvalSkip):
    """Newer bytes took the place of this snapshot before it was pinned."""

    reason = "superseded"


class PinViolation(EvalSkip):
    """The snapshot could not be loaded and proven, while the base model could."""

    reason = "pin_violation"


class VersionChanged(EvalSkip):
    """Engines that evald does not own changed their weights before the point was done."""

    reason = "version_changed"


class Unhealthy(EvalSkip):
    """No engine could serve the point within its deadline."""

    reason = "unhealthy"
