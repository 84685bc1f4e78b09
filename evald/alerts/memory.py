"""What was told already: from the ledger, so that a restart does not tell it again."""

from __future__ import annotations

import msgspec

from evald.alerts.verdict import Verdict
from evald.results.records import Alert

_Key = tuple[str, str, str]


class _Told(msgspec.Struct):
    """How often a rule has spoken of a subject, and whether that is not over yet."""

    times: int = 0
    active: bool = False


class Memory:
    """Turns verdicts into records: the first of an occurrence, and the one that it is over."""

    def __init__(self) -> None:
        self._told: dict[_Key, _Told] = {}

    def recall(self, record: Alert) -> None:
        """Take in a record of an earlier life; those that no rule made are not meant."""
        if record.subject:
            told = self._told.setdefault((record.name, record.run, record.subject), _Told())
            told.times += not record.cleared
            told.active = not record.cleared

    def take(self, name: str, run: str, verdict: Verdict) -> Alert | None:
        """Return what is to be recorded of a verdict of rule ``name``; None: nothing new.

        Its record id is the same if a crash makes another life find the same thing.
        """
        key = (name, run, verdict.subject)
        told = self._told.get(key) or _Told()
        if verdict.holds is None or verdict.holds == told.active:
            return None
        if not (verdict.holds or verdict.lasts):
            return None
        told.active = verdict.holds
        told.times += verdict.holds
        self._told[key] = told
        end = "" if verdict.holds else "/cleared"
        return Alert(
            run=run,
            step=verdict.step,
            revision=verdict.revision,
            record_id=f"{run}/alert/{name}/{verdict.subject}/{told.times}{end}",
            name=name,
            detail=verdict.detail,
            subject=verdict.subject,
            cleared=not verdict.holds,
        )
