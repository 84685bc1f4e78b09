"""When to scan again: hints that make the next scan come sooner. The scan alone is the truth.

A watch on the root cannot see a marker inside a snapshot in time, and a recursive one misses
markers in fresh directories and floods while shards are written. So folders are watched
non-recursively, and the marker (or what stands in for it) of each young unmarked directory is
looked at every 20 ms.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import structlog
import watchfiles
from watchfiles._rust_notify import WatchfilesRustInternalError

from evald.staging.completeness import Identity

log = structlog.get_logger(__name__)

#: a marker is looked at this often while its directory is young.
_POLL_S = 0.02
#: and this often where each look is a question to a server; also folders that give no events.
_SLOW_POLL_S = 0.25
#: looks of that many directories fit between two of them; more are looked at less often.
_LOOKS = 100
#: young: nothing was created in the directory for less than this.
_YOUNG_S = 60.0
#: a listener ends within its 10 ms step.
_STOP_S = 5.0
#: inotify sees local changes only; these file systems are changed by other hosts.
_BLIND = re.compile(
    r"nfs4?|lustre|fuse(\..+|blk)?|cifs|smb3?|9p|afs|ceph|gpfs|beegfs.*|virtiofs|glusterfs|orangefs"
)


class _Young(msgspec.Struct):
    """How an unmarked directory is looked at."""

    since: float
    mtime_ns: int
    due: float
    #: the marker's state at the last look.
    hint: Identity | None = None


class Watch:
    """Waits for a hint that something changed in the watched folders.

    ``hint`` returns the state of an unfinished directory's marker, or None: another state than the
    last one is worth a scan.
    """

    def __init__(
        self, root: Path, hint: Callable[[Path], Identity | None], *, scan_interval_s: float
    ) -> None:
        self._hint_of = hint
        self._interval_s = scan_interval_s
        self._hint = asyncio.Event()
        self._armed_for: Mapping[Path, Identity] = {}
        self._task: asyncio.Task[None] | None = None
        self._young: dict[Path, _Young] = {}
        network = blind_file_system(root)
        self._poll_s = _SLOW_POLL_S if network else _POLL_S
        #: why folders are looked at instead of listened to; empty while events come.
        self.blind_because = ""
        self._told_broken = False
        self._folder_times: dict[Path, int] = {}
        if network is not None:
            self._go_blind(f"inotify does not see what other hosts change on {network}")

    async def arm(self, folders: Mapping[Path, Identity]) -> bool:
        """Watch exactly these folders; True when that changed: scan again before waiting.

        A folder that was recreated has another inode: its old watch is silent for ever.
        """
        if self._task is not None and self._task.done():
            self._collect(self._task)
            self._armed_for, self._task = {}, None
        if folders == self._armed_for:
            return False
        self._armed_for = dict(folders)
        await self._stop_task()
        if folders and not self.blind_because:
            self._task = asyncio.create_task(self._listen([*folders]), name="staging hints")
            # its first step, up to the first wait, sets up the watches
            await asyncio.sleep(0)
        return True

    async def wait(self, unmarked: Iterable[Path]) -> None:
        """Return at a hint, a new marker in one of ``unmarked``, or after the scan interval."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._interval_s
        self._keep_young(unmarked, clock())
        while True:
            if await self._hinted(min([deadline, *self._dues(clock())]) - clock()):
                return
            now = clock()
            if now >= deadline:
                return
            due = {path: young for path, young in self._young.items() if young.due <= now}
            if (due or self.blind_because != "") and await asyncio.to_thread(self._look, due, now):
                return

    async def close(self) -> None:
        """Give up all watches."""
        await self._stop_task()
        self._armed_for = {}

    async def _hinted(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._hint.wait()
        except TimeoutError:
            return False
        self._hint.clear()
        return True

    def _dues(self, now: float) -> list[float]:
        dues = [young.due for young in self._young.values()]
        return [*dues, now + _SLOW_POLL_S] if self.blind_because else dues

    def _keep_young(self, unmarked: Iterable[Path], now: float) -> None:
        old = self._young
        fresh = [path for path in unmarked if path not in old]
        self._young = {path: old[path] for path in unmarked if path in old}
        for path in fresh:
            self._young[path] = _Young(since=now, mtime_ns=0, due=now)

    def _look(self, due: Mapping[Path, _Young], now: float) -> bool:
        """Stat the markers that are due, and silent folders; True when something is new."""
        if self.blind_because:
            times = {folder: _mtime_ns(folder) for folder in self._armed_for}
            if times != self._folder_times:
                self._folder_times = times
                return True
        is_news = False
        for path, young in due.items():
            before, young.hint = young.hint, self._hint_of(path)
            is_news = is_news or young.hint not in {None, before}
            mtime_ns = _mtime_ns(path)
            if mtime_ns != young.mtime_ns:  # a shard was begun: the marker may be near
                young.mtime_ns, young.since = mtime_ns, now
            young.due = now + self.poll_interval_s(now - young.since)
        return is_news

    def poll_interval_s(self, age_s: float) -> float:
        """Seconds between two looks at a directory in which nothing was created for ``age_s``."""
        crowd = max(len(self._young) / _LOOKS, 1.0)
        slower = self._poll_s * max(age_s / _YOUNG_S, 1.0) * crowd
        return min(slower, max(self._interval_s, self._poll_s))

    async def _listen(self, folders: list[Path]) -> None:
        async for _ in watchfiles.awatch(
            *folders,
            watch_filter=None,
            step=10,
            debounce=50,
            yield_on_timeout=True,
            rust_timeout=int(self._interval_s * 1000),
            recursive=False,
        ):
            self._hint.set()

    async def _stop_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=_STOP_S)
            for ended in done:
                self._collect(ended)

    def _collect(self, task: asyncio.Task[None]) -> None:
        """Learn from a listener that has ended: a missing folder is normal, the rest is not."""
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None or isinstance(error, FileNotFoundError):
            return
        if isinstance(error, WatchfilesRustInternalError):
            self._tell_broken(error)
            return
        self._go_blind(f"the kernel gives no events ({error})")

    def _tell_broken(self, error: Exception) -> None:
        """Say once that a listener broke off; the next scan puts another into its place."""
        if not self._told_broken:
            self._told_broken = True
            log.warning(
                "staging_watch_broken",
                why=f"the watch on the staging root broke off ({error}): what appears there may "
                f"be seen only by the scan every {self._interval_s:g} s; rename or remove a name "
                "that is not UTF-8",
            )

    def _go_blind(self, why: str) -> None:
        self.blind_because = why
        log.warning("staging_polled", why=why, poll_s=_SLOW_POLL_S)


def blind_file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the path's file system when inotify cannot see all of its changes."""
    real = os.path.realpath(path)
    best, best_type = "", ""
    for line in mountinfo.read_text(errors="replace").splitlines():
        mounted, _, source = line.partition(" - ")
        # spaces in a mount point are written as \040
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), mounted.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the last of equal ones is on top
            best, best_type = point, source.split(" ")[0]
    return best_type if _BLIND.fullmatch(best_type) else None


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
