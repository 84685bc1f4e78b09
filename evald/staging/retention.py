"""Giving up snapshots whose points have ended: a ring of ``keep``, then delete."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from evald.config import Staging
from evald.errors import SnapshotGone
from evald.point import EvalPoint, PointKey, SkipReason
from evald.results.records import PointRecord
from evald.staging.best import BestKeeper
from evald.staging.digest import fingerprint
from evald.staging.ended import Ended, EndedList
from evald.staging.inside import LeadsOut, folder_of, is_link, own_folder, remove
from evald.staging.leftovers import sweep_leftovers
from evald.staging.notices import Alerting

log = structlog.get_logger(__name__)

#: on the root's own file system: a snapshot is moved here and deleted here.
_TRASH = ".evald/trash"
#: the SDK's promises of room: ``trainer/publish/reservation.py``.
_RESERVED = ".evald/reserved"
#: seconds between two looks for what dead writers have left.
_LEFTOVERS_S = 600.0


class _Kept(msgspec.Struct, frozen=True):
    """An ended snapshot in the ring."""

    fingerprint: str
    size_bytes: int


class Retention:
    """Deletes in an owned root, and only what has ended and has not changed since.

    A directory is renamed into ``ROOT/.evald/trash`` first, so that no half of a snapshot is ever
    seen under its name. ``on_alert`` hears one sentence when something cannot be deleted. ``best``
    sees every snapshot first, and may hold some beside the ``keep`` others.
    """

    def __init__(
        self,
        config: Staging,
        *,
        on_alert: Alerting | None = None,
        best: BestKeeper | None = None,
    ) -> None:
        self._best = best
        self._root = Path(config.root)
        self._marker = config.marker
        #: it lies beside the snapshot's directory (a name like ``../done``).
        self._marker_is_outside = ".." in Path(config.marker).parts
        self._owned = config.owned
        self._keep = config.keep
        self._on_alert = on_alert
        #: folders of the pattern below the one with the step: they go with the snapshot.
        parts = Path(config.pattern).parts
        self._tail = len(parts) - 1 - next(i for i, part in enumerate(parts) if "{step}" in part)
        self._ring: dict[Path, _Kept] = {}
        self._ended = EndedList(self._root)
        self._changed: set[Path] = set()
        #: what could not be removed, and is tried again.
        self._unconsumed: set[Path] = set()
        self._undeleted: dict[Path, str] = {}
        self._lock = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the ended snapshots that are kept."""
        return sum(kept.size_bytes for kept in self._ring.values())

    @property
    def kept(self) -> list[Path]:
        """Directories in the ring, the next one to go first."""
        return list(self._ring)

    def take_changed(self) -> set[Path]:
        """Return the directories that were not as their points had known them, each once."""
        changed, self._changed = self._changed, set()
        return changed

    async def sweep(self) -> None:
        """Delete what an earlier life had moved to the trash, and learn what had ended then.

        For the daemon's start.
        """
        if self._owned:
            async with self._lock:
                await asyncio.to_thread(self._ended.load)
                await self._say(await asyncio.to_thread(self._sweep))

    async def sweep_leftovers(self) -> None:
        """Delete what dead writers and failed deletions have left, now and again.

        Returns only for an unowned root.
        """
        while self._owned:
            async with self._lock:
                for directory, known in list(self._undeleted.items()):
                    if await asyncio.to_thread(self._delete, directory, known) is None:
                        del self._undeleted[directory]
            try:
                await asyncio.to_thread(sweep_leftovers, self._root, _TRASH)
            except OSError as error:  # the root is away: the scan says so
                log.debug("leftovers_not_swept", error=str(error))
            await asyncio.sleep(_LEFTOVERS_S)

    def ended_before(self, directory: Path, fingerprint: str) -> Ended | None:
        """Return what ended in a directory of the root that has not changed since."""
        if not self._owned or not self._is_inside(directory):
            return None
        return self._ended.find(directory, fingerprint)

    async def end(self, point: EvalPoint, record: PointRecord) -> None:
        """Give up the snapshot of a point that has ended with ``record``."""
        snapshot = point.snapshot
        if self._best is not None:
            await self._best.consider(record, snapshot)
        if snapshot.owned:
            # without room for it the ring must not hold it either
            keep = record.reason != SkipReason.NO_SPACE
            await self.retire(snapshot.directory, snapshot.fingerprint, key=point.key, keep=keep)

    async def end_again(
        self, key: PointKey, directory: Path, fingerprint: str, *, owned: bool
    ) -> None:
        """Give up a snapshot whose point had ended before it was seen (again)."""
        if self._best is not None:
            await self._best.consider_again(key, directory, fingerprint)
        if owned:
            await self.retire(directory, fingerprint, key=key)

    async def retire(
        self,
        snapshot_dir: Path,
        fingerprint: str,
        *,
        key: PointKey | None = None,
        keep: bool = True,
    ) -> None:
        """Put an ended snapshot into the ring and delete the oldest beyond ``keep``.

        ``fingerprint``: of the snapshot when its point was offered. ``key``: that point, which the
        root remembers as ended. ``keep`` false: delete it now, there is no room for it. Does
        nothing in an unowned root and for a directory outside the root.
        """
        if not self._owned or not self._is_inside(snapshot_dir):
            return
        async with self._lock:
            # an older revision in the same place was replaced by what is there now
            self._ring.pop(snapshot_dir, None)
            size_bytes = await asyncio.to_thread(self._unchanged_bytes, snapshot_dir, fingerprint)
            if size_bytes is None:
                log.info("snapshot_gone_or_changed", directory=str(snapshot_dir))
                self._changed.add(snapshot_dir)
            elif not keep:
                await self._give_up(snapshot_dir, fingerprint)
            else:
                self._ring[snapshot_dir] = _Kept(fingerprint, size_bytes)
                if key is not None and (self._keep or self._is_held(snapshot_dir)):
                    await asyncio.to_thread(self._ended.note, snapshot_dir, fingerprint, key)
                log.info("snapshot_retired", directory=str(snapshot_dir), bytes=size_bytes)
            await self._trim()

    async def retry_best(self) -> None:
        """Give up what was held for ``best`` once it is copied; returns only without ``best``."""
        while self._best is not None:
            await self._best.retry()
            async with self._lock:
                await self._trim()

    async def _trim(self) -> None:
        """Delete the oldest beyond ``keep``."""
        free = [directory for directory in self._ring if not self._is_held(directory)]
        for oldest in free[: max(len(free) - self._keep, 0)]:
            # out of the ring first: a deletion that fails is told once, and tried again later
            kept = self._ring.pop(oldest)
            await self._give_up(oldest, kept.fingerprint)

    def _is_held(self, directory: Path) -> bool:
        return self._best is not None and self._best.holds(directory)

    async def _give_up(self, directory: Path, fingerprint: str) -> None:
        fault = await asyncio.to_thread(self._delete, directory, fingerprint)
        if fault is not None:
            self._undeleted[directory] = fingerprint
        await self._say(fault)

    async def keep(self, directory: Path) -> bool:
        """Take a snapshot out of the ring: its bytes are wanted once more; False: they are gone."""
        async with self._lock:  # a deletion that is under way has the last word
            self._ring.pop(directory, None)
            self._undeleted.pop(directory, None)
            if self._owned and self._is_inside(directory):
                await asyncio.to_thread(self._ended.forget, directory)
            return await asyncio.to_thread(directory.is_dir)

    async def consume(self, path: Path, *, again: bool = False) -> None:
        """Remove a trainer's file whose record is durable; nothing in a root that is not owned.

        ``again``: that it could not be removed was told.
        """
        if not self._owned:
            return
        try:
            await asyncio.to_thread(self._unlink, path)
        except OSError as error:
            # it is not read again: the ledger knows it
            self._unconsumed.add(path)
            tell = log.debug if again else log.warning
            tell("staging_file_kept", path=str(path), error=error.strerror)

    def take_unconsumed(self) -> set[Path]:
        """Return the files that ``consume`` could not remove, each once."""
        unconsumed, self._unconsumed = self._unconsumed, set()
        return unconsumed

    async def _say(self, fault: str | None) -> None:
        if fault is not None:
            log.warning("snapshot_not_deleted", detail=fault)
            if self._on_alert is not None:
                await self._on_alert("snapshot_not_deleted", fault)

    # --- blocking work -------------------------------------------------------------------------

    def _is_inside(self, directory: Path) -> bool:
        return directory != self._root and directory.is_relative_to(self._root)

    def _unchanged_bytes(self, directory: Path, expected: str) -> int | None:
        """Return the size of a directory that is as it was, None for any other."""
        try:
            found, size_bytes = fingerprint(directory, self._marker)
        except (FileNotFoundError, SnapshotGone):
            return None
        return size_bytes if found == expected else None

    def _delete(self, directory: Path, expected: str) -> str | None:
        """Delete an ended snapshot; returns None, or one sentence."""
        if self._unchanged_bytes(directory, expected) is None:
            log.info("snapshot_gone_or_changed", directory=str(directory))
            return None
        try:
            fault = self._remove_checked(directory, expected)
        except FileNotFoundError:
            fault = None  # somebody else has deleted it, which is what was wanted
        except OSError as error:
            fault = _sentence(directory, error)
        return fault

    def _remove_checked(self, directory: Path, expected: str) -> str | None:
        """Move it away, look again, remove it; raises OSError."""
        with folder_of(self._root, directory) as (folder, name):
            if is_link(name, folder):
                os.unlink(name, dir_fd=folder)  # no bytes to lose; moved, it could lead elsewhere
            else:
                with own_folder(self._root, _TRASH) as trash:
                    if self._marker_is_outside:
                        expected = self._take_marker_away(directory)
                    moved = f"{name}.{secrets.token_hex(8)}"
                    os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=trash)
                    in_trash = self._root / _TRASH / moved
                    if self._unchanged_bytes(in_trash, expected) is None:
                        return _put_back(in_trash, trash, directory, folder)
                    remove(moved, trash)
        self._remove_empty_parents(directory)
        log.info("snapshot_deleted", directory=str(directory))
        return None

    def _take_marker_away(self, directory: Path) -> str:
        """Remove a marker outside, which does not move along; returns the fingerprint without."""
        marker = Path(os.path.normpath(directory / self._marker))
        of_step = directory.parents[self._tail - 1] if self._tail else directory
        if not marker.is_relative_to(of_step):
            raise OSError(0, f"its marker {marker} is not its own alone; choose another marker")
        self._unlink(marker)
        return fingerprint(directory, self._marker)[0]

    def _unlink(self, path: Path) -> None:
        """Remove one name below the root, if it is there; raises OSError."""
        with suppress(FileNotFoundError), folder_of(self._root, path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def _sweep(self) -> str | None:
        """Empty the trash; one sentence of what stays."""
        at, fault = self._root / _TRASH, None
        try:
            with own_folder(self._root, _RESERVED) as reserved, suppress(PermissionError):
                # who may write into the root may reserve room in it
                os.fchmod(reserved, stat.S_IMODE(self._root.stat().st_mode))
            # made now: on a full disk there may be no room for it when it is needed
            with own_folder(self._root, _TRASH) as trash:
                with os.scandir(trash) as found:
                    names = [entry.name for entry in found]
                for name in names:
                    try:
                        remove(name, trash)
                        log.info("trash_swept", name=name)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        fault = _sentence(at / name, error)
        except OSError as error:
            return _sentence(at, error)
        return fault

    def _remove_empty_parents(self, directory: Path) -> None:
        for parent in list(directory.parents)[: self._tail]:
            try:
                with folder_of(self._root, parent) as (folder, name):
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return  # the trainer keeps more in it


def _put_back(moved: Path, trash: int, directory: Path, folder: int) -> str | None:
    """Undo a move: the directory changed at the last moment."""
    try:
        os.rename(moved.name, directory.name, src_dir_fd=trash, dst_dir_fd=folder)
    except OSError as error:
        return (
            f"cannot put {moved} back to {directory}, where it changed after its point had ended: "
            f"{error.strerror}; look at it before evald's next start deletes it"
        )
    log.info("snapshot_gone_or_changed", directory=str(directory))
    return None


def _sentence(directory: Path, error: OSError) -> str:
    if isinstance(error, LeadsOut):
        return f"cannot delete {directory}: {error.strerror}; evald deletes in its root only"
    where = f" ({error.filename})" if error.filename else ""
    return (
        f"cannot delete {directory}: {error.strerror}{where}; delete it by hand, and run trainer "
        "and evald as one user or give evald's user a default ACL on the staging root"
    )
