"""Which point a candidate is: a new one, a known one, or one that is answered already."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from evald.point import Kind, Outcome, PointKey
from evald.results.index import PointIndex, PointState
from evald.staging.candidate import Candidate


class Verdict(enum.Enum):
    """What is to be done with a candidate."""

    #: offer it as the decision's key.
    OFFER = enum.auto()
    #: it was offered before and its point has not ended.
    OFFERED = enum.auto()
    #: its point has ended, or another one has answered for equal bytes: retire it.
    ENDED = enum.auto()
    #: equal bytes are being measured: decide when their point has ended.
    WAIT = enum.auto()
    #: only its digest can tell.
    HASH = enum.auto()


class Decision(msgspec.Struct, frozen=True):
    """A verdict and the point that it is about; ``end_seq``: when that point ended."""

    verdict: Verdict
    key: PointKey
    end_seq: int = 0


class _Given(msgspec.Struct, frozen=True):
    """What was offered under a key in this life; the ledger may not know it yet."""

    fingerprint: str
    digest: str | None


class Revisions:
    """Assigns keys: what the ledger knows, and what was offered since the daemon started.

    ``is_present`` tells whether the last scan saw a finished snapshot in a directory.
    """

    def __init__(self, index: PointIndex, *, is_present: Callable[[Path], bool]) -> None:
        self._index = index
        self._is_present = is_present
        self._given: dict[PointKey, _Given] = {}
        self._by_step: dict[tuple[str, int, Kind], list[PointKey]] = {}

    def give(self, key: PointKey, candidate: Candidate | None) -> None:
        """Note that ``key`` is being offered (None: as lost)."""
        keys = self._by_step.setdefault((key.run, key.step, key.kind), [])
        if key not in keys:
            keys.append(key)
        self._given[key] = (
            _Given(candidate.fingerprint, candidate.digest) if candidate else _Given("", None)
        )

    def reserve(self, key: PointKey) -> None:
        """Keep the key of a step without snapshot from a snapshot that comes at the same time."""
        of_step = (key.run, key.step, key.kind)
        if not self.knows(*of_step):
            self.give(key, None)

    def take(self, run: str, step: int, kind: Kind) -> PointKey:
        """Give the next revision of a step to somebody who has no snapshot to offer."""
        keys = [state.key for state in self._index.revisions(run, step, kind)]
        keys += self._by_step.get((run, step, kind), ())
        key = PointKey(run, step, max((key.revision for key in keys), default=-1) + 1, kind)
        self.give(key, None)
        return key

    def is_given(self, key: PointKey) -> bool:
        """Tell whether ``key`` was offered in this life."""
        return key in self._given

    def is_known_step(self, candidate: Candidate) -> bool:
        """Tell whether the step has a point already, so that the digest decides."""
        return self.knows(candidate.run, candidate.step, candidate.kind)

    def knows(self, run: str, step: int, kind: Kind) -> bool:
        """Tell whether a step has a point already, in the ledger or on its way there."""
        return bool(self._index.revisions(run, step, kind) or self._by_step.get((run, step, kind)))

    def by_fingerprint(self, candidate: Candidate) -> Decision | None:
        """Decide about a directory that is exactly as it was when its point was offered."""
        for key in self._keys(candidate):
            state, given = self._index.get(key), self._given.get(key)
            # no fingerprint at all: a request for a missing directory is about the known point
            seen = {given.fingerprint if given else "", state.fingerprint if state else ""}
            if candidate.fingerprint not in seen:
                continue
            if state is not None and state.outcome is not None:
                if state.outcome is Outcome.SKIPPED and candidate.weight_version is not None:
                    return None  # a trainer that waits, and asks once more, gets an answer
                return Decision(Verdict.ENDED, key, state.end_seq)
            return Decision(Verdict.OFFERED if given else Verdict.OFFER, key)
        return None

    def decide(self, candidate: Candidate) -> Decision:
        """Decide; OFFER with a new key means the next revision."""
        decision = self.by_fingerprint(candidate)
        if decision is not None:
            return decision
        keys = list(self._keys(candidate))
        following = PointKey(
            candidate.run,
            candidate.step,
            max((key.revision for key in keys), default=-1) + 1,
            candidate.kind,
        )
        if not keys or candidate.fault:
            return Decision(Verdict.OFFER, following)
        if candidate.digest is None:
            return Decision(Verdict.HASH, following)
        equal = [key for key in keys if candidate.digest in self._digests(key)]
        return self._by_equal_bytes(equal, candidate) or Decision(Verdict.OFFER, following)

    def _by_equal_bytes(self, equal: list[PointKey], candidate: Candidate) -> Decision | None:
        """Decide by points of the same bytes; a skipped one is no answer."""
        still_open = None
        for key in equal:
            state = self._index.get(key)
            if state is None or state.outcome is None:
                still_open = (key, state)
            elif state.outcome is not Outcome.SKIPPED:
                return Decision(Verdict.ENDED, key, state.end_seq)
        if still_open is None:
            return None
        key, state = still_open
        return Decision(Verdict.OFFER if self._may_claim(state, candidate) else Verdict.WAIT, key)

    def _may_claim(self, state: PointState | None, candidate: Candidate) -> bool:
        """Tell whether equal bytes may stand in for an earlier life's point that lost its own."""
        if state is None or self.is_given(state.key):
            return False
        directory = Path(state.directory)
        return directory == candidate.directory or not self._is_present(directory)

    def _keys(self, candidate: Candidate) -> Iterator[PointKey]:
        """Return the keys of the candidate's step, highest revision first."""
        of_step = (candidate.run, candidate.step, candidate.kind)
        keys = {state.key for state in self._index.revisions(*of_step)}
        keys.update(self._by_step.get(of_step, ()))
        yield from sorted(keys, key=lambda key: -key.revision)

    def _digests(self, key: PointKey) -> set[str | None]:
        state, given = self._index.get(key), self._given.get(key)
        return {state.digest if state else None, given.digest if given else None} - {None}
