"""What a training job has dropped and the ledger has not answered: the accounting, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from evald.point import Kind, Outcome
from evald.status.view import StatusView
from evald.trainer.dispatcher.pulse import SETTLED_BEATS

#: a living daemon that shows nothing of a step that it knew before has answered it: the same bytes
#: come to no second record.
_ANSWERED_AFTER_S = 60.0
#: it reads, and hashes, what was published again at least this fast.
_HASHED_BYTES_PER_S = 200e6


class Name(msgspec.Struct, frozen=True, order=True):
    """A point as a trainer names it: revisions are the daemon's."""

    kind: Kind
    step: int

    def __str__(self) -> str:
        """Show it in a sentence."""
        return f"step {self.step}" if self.kind is Kind.STEP else "baseline"


class Drop(msgspec.Struct):
    """What was given to the daemon."""

    #: lowest revision that its record can have.
    revision: int
    #: since when (caller's clock) a living daemon can see it.
    since_s: float
    size_bytes: int = 0
    #: a step without snapshot: it takes no room at the daemon.
    skipped: bool = False
    #: of the snapshot's content, where its manifest tells.
    digest: str | None = None
    #: process and beat of the daemon when it was first seen to be gone from the root.
    gone_at: tuple[int, int] | None = None


class InFlight:
    """Points of one run that have not ended, as far as drops, ledger and status tell.

    A point counts once, whichever of the three knows of it: an earlier life of the job has left
    some behind.
    """

    def __init__(self) -> None:
        self._drops: dict[Name, Drop] = {}
        #: highest revision that was accepted or has ended.
        self._newest: dict[Name, int] = {}
        #: highest revision that has ended.
        self._ended: dict[Name, int] = {}
        #: accepted and not ended, in that order.
        self._open: dict[tuple[Name, int], None] = {}
        #: queued or running by the newest status.
        self._listed: dict[tuple[Name, int], None] = {}
        #: lowest revisions that are this life's.
        self._own: dict[Name, int] = {}

    # --- what the job does ---------------------------------------------------------------------

    def drop(self, name: Name, *, now_s: float, size_bytes: int = 0, skipped: bool = False) -> None:
        """Note that a snapshot, a request or a skip is given to the daemon now."""
        before = self._drops.get(name)
        revision = max(self._newest.get(name, -1), before.revision if before else -1) + 1
        self._drops.pop(name, None)  # it goes to the end of the line
        self._drops[name] = Drop(revision, now_s, size_bytes, skipped)
        self._own.setdefault(name, revision)

    def inherit(self, name: Name, *, now_s: float, skipped: bool = False) -> None:
        """Note what an earlier life has left in the staging root, unless the ledger knows it."""
        if not self.is_known(name):
            self._drops.setdefault(name, Drop(0, now_s, skipped=skipped))

    def forget(self, name: Name) -> None:
        """Note that it came to nothing, or to nothing new."""
        self._drops.pop(name, None)

    def identify(self, name: Name, digest: str) -> None:
        """Note the bytes that were dropped: an earlier revision may answer them."""
        if (drop := self._drops.get(name)) is not None:
            drop.digest = digest

    # --- what the daemon says ------------------------------------------------------------------

    def apply(self, record: dict[str, Any]) -> bool:
        """Take in a record of the run; tell whether it ends what was dropped."""
        if record["type"] not in {"accepted", "point"}:
            return False
        name, revision = Name(Kind(record["kind"]), record["step"]), record["revision"]
        self._newest[name] = max(self._newest.get(name, -1), revision)
        if record["type"] == "accepted":
            if revision > self._ended.get(name, -1):
                self._open[name, revision] = None
            return False
        self._ended[name] = max(self._ended.get(name, -1), revision)
        self._open.pop((name, revision), None)
        drop = self._drops.get(name)
        if drop is None or not _answers(record, drop):
            return False
        del self._drops[name]
        return True

    def see(self, status: StatusView, run: str) -> None:
        """Take in what queues and runs; the ledger, which is newer, wins."""
        self._listed = {
            (Name(Kind(point.kind), point.step), point.revision): None
            for point in (*status.running, *status.queued)
            if point.run == run
        }

    def settle_answered(
        self, now_s: float, *, is_gone: Callable[[Name], bool], beat: tuple[int, int]
    ) -> list[Name]:
        """Let go of what a daemon that lives will not answer again; return the points of it.

        A step that the daemon knew before leads to no second record if the bytes are the same; a
        skip leads to none if the daemon had the step's snapshot after all. ``is_gone``: the daemon
        has taken it from the root, which it does after the record; ``beat``: of the newest status.
        """
        held = set(self._held())
        answered = []
        for name, drop in self._drops.items():
            if name in held or not (drop.revision > 0 or drop.skipped):
                continue
            if not is_gone(name):
                drop.gone_at = None
            elif drop.gone_at is None or drop.gone_at[0] != beat[0]:
                drop.gone_at = beat
            is_read = drop.gone_at is not None and beat[1] - drop.gone_at[1] >= SETTLED_BEATS
            patience_s = _ANSWERED_AFTER_S + drop.size_bytes / _HASHED_BYTES_PER_S
            if is_read or now_s - drop.since_s > patience_s:
                answered.append((name, drop))
        for name, _ in answered:
            del self._drops[name]
        return [name for name, drop in answered if not drop.skipped]

    def restart_waiting(self, now_s: float, only: Name | None = None) -> None:
        """Note that the daemon can see what was dropped, or ``only`` this, from now on."""
        for name, drop in self._drops.items():
            if only in {None, name}:
                drop.since_s = now_s

    def forget_ledger(self) -> None:
        """Note that the ledger began anew: nothing is known, and what was dropped is revision 0."""
        for known in (self._newest, self._ended, self._open, self._listed):
            known.clear()
        for drop in self._drops.values():
            drop.revision = 0
        self._own = dict.fromkeys(self._own, 0)

    # --- what is to be known -------------------------------------------------------------------

    def taking_room(self) -> list[Name]:
        """Return what counts against the cap: all that is missing but skips."""
        dropped = [name for name, drop in self._drops.items() if not drop.skipped]
        return list(dict.fromkeys([*self._held(), *dropped]))

    def missing(self) -> list[Name]:
        """Return every point that has no terminal record yet, oldest first."""
        return list(dict.fromkeys([*self._held(), *self._drops]))

    def unseen(self, now_s: float, after_s: float) -> list[Name]:
        """Return drops of which a living daemon has shown nothing for ``after_s``."""
        held = set(self._held())
        return [
            name
            for name, drop in self._drops.items()
            if name not in held and now_s - drop.since_s > after_s
        ]

    def unlisted_bytes(self) -> int:
        """Return the bytes of snapshots that the daemon does not count as its own yet."""
        held = set(self._held())
        return sum(drop.size_bytes for name, drop in self._drops.items() if name not in held)

    def is_pending(self, name: Name) -> bool:
        """Tell whether a snapshot or request of this name has not ended."""
        return name in self.taking_room()

    def is_skipped(self, name: Name) -> bool:
        """Tell whether a skip of this name has no record yet."""
        return (drop := self._drops.get(name)) is not None and drop.skipped

    def is_known(self, name: Name) -> bool:
        """Tell whether the ledger has a record of this name."""
        return name in self._newest

    def has_ended(self, name: Name) -> bool:
        """Tell whether the ledger has a terminal record of this name."""
        return name in self._ended

    def any_baseline(self) -> bool:
        """Tell whether the run has a baseline, or will have."""
        known = (*self._newest, *self.missing())
        return any(name.kind is Kind.BASELINE for name in known)

    def is_own(self, record: dict[str, Any]) -> bool:
        """Tell whether a record is about what this life has dropped."""
        lowest = self._own.get(Name(Kind(record["kind"]), record["step"]))
        return lowest is not None and bool(record["revision"] >= lowest)

    def _held(self) -> list[Name]:
        """Return what the daemon has: accepted, or queued or running by the newest status."""
        listed = [name for name, revision in self._listed if revision > self._ended.get(name, -1)]
        return [*(name for name, _ in self._open), *listed]


def _answers(record: dict[str, Any], drop: Drop) -> bool:
    """Tell whether a terminal record is about what was dropped, or about the same bytes."""
    measured = record["outcome"] != Outcome.SKIPPED
    if drop.digest is not None and measured and record.get("digest") == drop.digest:
        return True
    # (what was graded again answers nobody: its weights are those of an earlier revision)
    is_regrade = "regraded_from" in (record.get("provenance") or ())
    return drop.revision <= int(record["revision"]) and not is_regrade
