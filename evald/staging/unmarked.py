"""Directories that stay without their marker: whoever wrote them has died, or forgotten them.

Their steps would be gaps in the curve that nothing explains. So each of them is told of once, as
missing; a marker that comes after all makes the next revision of the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from evald.config import Staging
from evald.errors import SnapshotGone
from evald.point import Kind, SkipReason
from evald.results.index import PointIndex
from evald.staging.digest import fingerprint
from evald.staging.offers import LostPoint, Offer
from evald.staging.revisions import Revisions
from evald.staging.scan import Found, Unfinished

log = structlog.get_logger(__name__)

#: looks at all of them come as often as the shorter limit asks for, but not less often than that.
_LONGEST_PAUSE_S = 10.0
_LOOKS_IN_A_LIMIT = 4
#: at the end of a run, what has not changed for so long does not change any more.
_ENDED_AFTER_S = 5.0


class _Watched(msgspec.Struct, frozen=True):
    """Since when (monotonic) a directory has been as it is."""

    fingerprint: str
    since: float


class Unmarked:
    """Finds out that a directory will not get its marker, and offers its step as missing.

    ``run``: of directories directly in the root, unless a snapshot beside one names another.
    ``offer`` is awaited with each find, and returns once it is durable.
    """

    def __init__(
        self,
        config: Staging,
        *,
        run: str,
        index: PointIndex,
        revisions: Revisions,
        offer: Callable[[Offer], Awaitable[None]],
    ) -> None:
        self._config = config
        self._run = run
        self._index = index
        self._revisions = revisions
        self._offer = offer
        #: what the last scan saw.
        self._unfinished: Mapping[Path, Unfinished] = {}
        #: of those: nobody knows what is in them.
        self._closed: Mapping[Path, Unfinished] = {}
        self._doubts: Mapping[Path, str] = {}
        self._watched: dict[Path, _Watched] = {}
        #: folder -> run that the newest snapshot in it belongs to: a manifest may name it.
        self._named: dict[Path, str] = {}
        # a run's end and the regular looks must not tell of the same one
        self._looking = asyncio.Lock()

    def see(self, found: Found) -> None:
        """Take in a scan."""
        self._unfinished = {**found.unmarked, **found.closed}
        self._closed, self._doubts = found.closed, found.doubtful
        self._watched = {p: one for p, one in self._watched.items() if p in self._unfinished}

    def name(self, snapshot_dir: Path, run: str) -> None:
        """Learn to which run a snapshot belongs, and thereby those beside it."""
        self._named[snapshot_dir.parent] = run

    async def run(self) -> None:
        """Look at them again and again; never returns."""
        shorter_s = min(self._config.unmarked_after_s, self._config.overtaken_after_s)
        while True:
            await self._look()
            await asyncio.sleep(min(shorter_s / _LOOKS_IN_A_LIMIT, _LONGEST_PAUSE_S))

    async def end(self, run: str) -> None:
        """Take in that ``run`` is over: what stands still is missing now."""
        limit_s = min(_ENDED_AFTER_S, self._config.overtaken_after_s)
        if any(self._is_open(path, run) for path in self._unfinished):
            await self._look()
            await asyncio.sleep(limit_s)
            await self._look({run: limit_s})

    def _is_open(self, path: Path, run: str | None = None) -> bool:
        """Tell whether a directory (of ``run``) is of a step that nobody has said anything of."""
        own = self._run_of(path)
        step = self._unfinished[path].step
        return run in {None, own} and not self._revisions.knows(own, step, Kind.STEP)

    def _run_of(self, path: Path) -> str:
        return self._unfinished[path].folder_run or self._named.get(path.parent, self._run)

    async def _look(self, limits_s: Mapping[str, float] | None = None) -> None:
        """Look at all of them; ``limits_s``: those of runs that have others than the config's."""
        async with self._looking:
            for path in list(self._unfinished):
                if path in self._unfinished and self._is_open(path):
                    await self._look_at(path, limits_s or {})

    async def _look_at(self, path: Path, limits_s: Mapping[str, float]) -> None:
        run, step = self._run_of(path), self._unfinished[path].step
        newest = self._index.newest_step(run)
        overtaken = newest is not None and newest > step
        config = self._config
        limit_s = config.overtaken_after_s if overtaken else config.unmarked_after_s
        limit_s = limits_s.get(run, limit_s)
        watched = self._watched.get(path)
        if watched is not None and time.monotonic() - watched.since < limit_s:
            return
        try:
            found, _ = await asyncio.to_thread(fingerprint, path, config.marker)
        except (FileNotFoundError, SnapshotGone):
            if path not in self._closed:
                return  # gone, or still to be made
            found = ""
        # a scan may have seen its marker meanwhile
        if path not in self._unfinished or not self._is_open(path):
            return
        if watched is None or watched.fingerprint != found:
            self._watched[path] = _Watched(found, time.monotonic())
            return
        detail = (
            f"{path} stays without its marker {config.marker}: nothing in it has changed for "
            f"{limit_s:g} s"
        )
        if path in self._closed:
            detail = f"evald may not look into {path}, for {limit_s:g} s now: open it (chmod 0755)"
        if overtaken:
            detail += f", and step {newest} of its run is there"
        if doubt := self._doubts.get(path):
            detail += f" ({doubt})"
        key = self._revisions.take(run, step, Kind.STEP)
        log.warning("snapshot_unmarked", point=str(key), detail=detail)
        await self._offer(LostPoint(key, path, detail, SkipReason.CKPT_MISSING))
