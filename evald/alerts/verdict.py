"""What a rule finds, and what a rule is."""

from __future__ import annotations

import msgspec

from evald.config_alerts import AlertRule
from evald.results.records import AnyRecord
from evald.status.view import StatusView


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a condition holds for one subject; None: neither clearly so nor clearly not."""

    subject: str
    holds: bool | None
    #: one sentence for people, as things are now.
    detail: str
    #: it can be over, and is told again when it comes back; else it is told once for its subject.
    lasts: bool = True
    #: the point that it is about; "": of the daemon, no point.
    run: str = ""
    step: int = 0
    revision: int = 0


class Rule:
    """One ``[[alert]]``: sees every record in order, and the status about once a second.

    Rules are pure: what was told before, and what becomes of a verdict, is not their business.
    """

    def __init__(self, config: AlertRule) -> None:
        self.config = config

    def note(self, record: AnyRecord) -> list[Verdict]:
        """Take in a record of the ledger."""
        del record
        return []

    def check(self, view: StatusView, now_s: float) -> list[Verdict]:
        """Look at the status; ``now_s``: seconds since the epoch."""
        del view, now_s
        return []
