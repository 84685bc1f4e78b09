"""Points that an earlier life had accepted and not ended, and that no scan can find."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from evald.errors import SnapshotGone
from evald.point import SHARED, Kind, PointKey, SkipReason
from evald.results.index import PointState
from evald.staging.candidate import Candidate, Reader, name_shared
from evald.staging.offers import LostPoint, Offer
from evald.staging.revisions import Revisions


class Recovery:
    """Offers what lies outside the root again, and reports what has lost its bytes.

    ``is_present`` tells whether the last scan saw a finished snapshot in a directory;
    ``offer_as`` offers a candidate under a key that it had before.
    """

    def __init__(
        self,
        root: Path,
        *,
        reader: Reader,
        revisions: Revisions,
        is_present: Callable[[Path], bool],
        offer: Callable[[Offer], Awaitable[None]],
        offer_as: Callable[[PointKey, Candidate], Awaitable[None]],
    ) -> None:
        self._root = root
        self._reader = reader
        self._revisions = revisions
        self._is_present = is_present
        self._offer = offer
        self._offer_as = offer_as

    async def run(self, known: Iterable[PointState], first: set[asyncio.Task[None]]) -> None:
        """Go through the points that were open at the start, once the first scan is offered."""
        if first:
            await asyncio.wait(first)
        for state in known:
            if state.outcome is not None or self._revisions.is_given(state.key):
                continue
            directory = Path(state.directory)
            if not state.directory:
                await self._cut_short(state)
            elif state.owned or directory.is_relative_to(self._root):
                await self._lose(state, rewritten=self._is_present(directory))
            else:
                await self._outside(state)

    async def _outside(self, state: PointState) -> None:
        """Offer a baseline's or a request's directory again: its request is consumed by now."""
        candidate = Candidate(
            run=state.key.run,
            step=state.key.step,
            kind=Kind(state.key.kind),
            directory=Path(state.directory),
            owned=False,
        )
        if state.fingerprint.startswith(SHARED):
            name_shared(candidate, state.fingerprint.removeprefix(SHARED))
            await self._offer_as(state.key, candidate)
            return
        try:
            await asyncio.to_thread(self._reader.look_again, candidate)
        except SnapshotGone:
            await self._lose(state, rewritten=False)
            return
        if candidate.fingerprint == state.fingerprint:
            await self._offer_as(state.key, candidate)
        else:
            await self._lose(state, rewritten=True)

    async def _cut_short(self, state: PointState) -> None:
        """End a revision that has set records and was never accepted: a regrade was writing it."""
        detail = (
            f"the daemon was killed while it wrote {state.key}, earlier samples that were graded "
            "again; ask for that once more"
        )
        self._revisions.give(state.key, None)
        await self._offer(LostPoint(state.key, Path(), detail, SkipReason.ABORTED))

    async def _lose(self, state: PointState, *, rewritten: bool) -> None:
        if rewritten:
            reason = SkipReason.SUPERSEDED
            detail = (
                f"{state.directory} was rewritten after {state.key} had been accepted and before "
                "it was measured, or the config gives it to another run now"
            )
        else:
            reason = SkipReason.CKPT_MISSING
            detail = (
                f"cannot find snapshot {state.directory} of {state.key} any more: it, or its "
                "marker, vanished while evald was down (tmpfs is empty after a reboot)"
            )
        self._revisions.give(state.key, None)
        await self._offer(LostPoint(state.key, Path(state.directory), detail, reason))
