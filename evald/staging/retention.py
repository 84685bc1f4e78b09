"""Giving up snapshots whose points have ended: a ring of ``keep``, then delete."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from pathlib import Path

import msgspec
import structlog

from evald.config import Staging
from evald.errors import SnapshotGone
from evald.staging.alerts import Alerting
from evald.staging.digest import fingerprint

log = structlog.get_logger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """An ended snapshot in the ring."""

    fingerprint: str
    size_bytes: int


class Retention:
    """Deletes in an owned root, and only what has ended and has not changed since.

    A directory is renamed into ``ROOT/.evald/trash`` first, so that no half of a snapshot is ever
    seen under its name. ``on_alert`` hears one sentence when something cannot be deleted.
    """

    def __init__(self, config: Staging, *, on_alert: Alerting | None = None) -> None:
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
        self._lock = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the ended snapshots that are kept."""
        return sum(kept.size_bytes for kept in self._ring.values())

    @property
    def kept(self) -> list[Path]:
        """Directories in the ring, the next one to go first."""
        return list(self._ring)

    async def sweep(self) -> None:
        """Delete what an earlier life had moved to the trash; for the daemon's start."""
        if self._owned:
            async with self._lock:
                await self._say(await asyncio.to_thread(self._sweep))

    async def retire(self, snapshot_dir: Path, fingerprint: str) -> None:
        """Put an ended snapshot into the ring and delete the oldest beyond ``keep``.

        ``fingerprint``: of the snapshot when its point was offered. Does nothing in an unowned root
        and for a directory outside the root.
        """
        if not self._owned or not self._is_inside(snapshot_dir):
            return
        async with self._lock:
            # an older revision in the same place was replaced by what is there now
            self._ring.pop(snapshot_dir, None)
            size_bytes = await asyncio.to_thread(self._unchanged_bytes, snapshot_dir, fingerprint)
            if size_bytes is None:
                log.info("snapshot_gone_or_changed", directory=str(snapshot_dir))
            else:
                self._ring[snapshot_dir] = _Kept(fingerprint, size_bytes)
                log.info("snapshot_retired", directory=str(snapshot_dir), bytes=size_bytes)
            while len(self._ring) > self._keep:
                oldest = next(iter(self._ring))
                # out of the ring first: a deletion that fails is told once and not tried again
                kept = self._ring.pop(oldest)
                await self._say(await asyncio.to_thread(self._delete, oldest, kept.fingerprint))

    async def keep(self, directory: Path) -> bool:
        """Take a snapshot out of the ring: its bytes are wanted once more; False: they are gone."""
        async with self._lock:  # a deletion that is under way has the last word
            self._ring.pop(directory, None)
            return await asyncio.to_thread(directory.is_dir)

    async def consume(self, path: Path) -> None:
        """Remove a trainer's file whose record is durable; nothing in a root that is not owned."""
        if not self._owned:
            return
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            # it is not read again in this life, and the ledger knows it in the next one
            log.warning("staging_file_kept", path=str(path), error=error.strerror)

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
        if self._is_behind_link(directory):
            return f"cannot delete {directory}: a folder on the way is a link out of the root"
        try:
            fault = self._remove_checked(directory, expected)
        except FileNotFoundError:
            fault = None  # somebody else has deleted it, which is what was wanted
        except (OSError, RecursionError) as error:
            fault = _sentence(directory, error)
        return fault

    def _remove_checked(self, directory: Path, expected: str) -> str | None:
        """Move it away, look again, remove it; raises OSError, RecursionError."""
        if directory.is_symlink():
            directory.unlink()  # no bytes to lose; moved away, it could lead elsewhere
        else:
            moved = self._trash() / f"{directory.name}.{secrets.token_hex(8)}"
            if self._marker_is_outside:
                expected = self._take_marker_away(directory)
            directory.rename(moved)
            if self._unchanged_bytes(moved, expected) is None:
                return _put_back(moved, directory)
            _remove(moved)
        self._remove_empty_parents(directory)
        log.info("snapshot_deleted", directory=str(directory))
        return None

    def _take_marker_away(self, directory: Path) -> str:
        """Remove a marker outside, which does not move along; returns the fingerprint without."""
        marker = Path(os.path.normpath(directory / self._marker))
        of_step = directory.parents[self._tail - 1] if self._tail else directory
        if not marker.is_relative_to(of_step):
            raise OSError(0, f"its marker {marker} is not its own alone; choose another marker")
        marker.unlink()
        return fingerprint(directory, self._marker)[0]

    def _is_behind_link(self, directory: Path) -> bool:
        below = directory.parent.relative_to(self._root)
        return os.path.realpath(directory.parent) != str(Path(os.path.realpath(self._root), below))

    def _trash(self) -> Path:
        """Make the trash folder; a link in its place would lead deletions elsewhere."""
        trash = self._root / ".evald" / "trash"
        trash.mkdir(parents=True, exist_ok=True)
        for folder in (trash.parent, trash):
            if folder.is_symlink():
                raise OSError(0, f"{folder} is a symbolic link; remove it")
        return trash

    def _sweep(self) -> str | None:
        trash = self._root / ".evald" / "trash"
        try:
            # made now: on a full disk there may be no room for it when it is needed
            for leftover in self._trash().iterdir():
                _remove(leftover)
                log.info("trash_swept", name=leftover.name)
        except (OSError, RecursionError) as error:
            return _sentence(trash, error)
        return None

    def _remove_empty_parents(self, directory: Path) -> None:
        for parent in list(directory.parents)[: self._tail]:
            try:
                parent.rmdir()
            except OSError:
                return  # the trainer keeps more in it


def _remove(path: Path) -> None:
    """Delete a tree, or a link itself; on Linux rmtree works on descriptors and follows no link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _put_back(moved: Path, directory: Path) -> str | None:
    """Undo a move: the directory changed at the last moment."""
    try:
        moved.rename(directory)
    except OSError as error:
        return (
            f"cannot put {moved} back to {directory}, where it changed after its point had ended: "
            f"{error.strerror}; look at it before evald's next start deletes it"
        )
    log.info("snapshot_gone_or_changed", directory=str(directory))
    return None


def _sentence(directory: Path, error: OSError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return f"cannot delete {directory}: its folders are nested too deep; delete it by hand"
    where = f" ({error.filename})" if error.filename else ""
    return (
        f"cannot delete {directory}: {error.strerror}{where}; delete it by hand, and run trainer "
        "and evald as one user or give evald's user a default ACL on the staging root"
    )
