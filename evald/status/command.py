"""What an operator says to a running daemon."""

from __future__ import annotations

from typing import Literal

import msgspec


class Command(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One command; which fields it needs depends on the verb."""

    verb: Literal[
        "retry",
        "skip",
        "abort",
        "pause",
        "resume",
        "drain",
        "reload",
        "restart",
        "release",
        "regrade",
    ]
    #: retry, skip, abort: which step; ``run`` defaults to the config's.
    step: int | None = None
    run: str | None = None
    #: restart, release: which engine.
    engine: str | None = None
    #: skip, abort: goes into the record.
    why: str = ""
    #: regrade: which steps and eval sets; none: all.
    steps: list[int] = []
    sets: list[str] = []
    #: regrade: config digests of eval sets that the daemon must have as well.
    expects: dict[str, str] = {}
    #: regrade: a name for it, by which the status shows it.
    ticket: str = ""
