"""The best snapshot stays: copied to a directory of its own before anything can retire it.

``DIR/<run>/step_N.rR/`` holds its files, and the point's record as ``evald_record.json``;
``DIR/<run>/best`` is a link to it. The copy is made under a hidden name, synced and renamed; the
link turns to it at once, and only then the one before goes. So a reader of ``best`` always finds a
whole snapshot, whatever dies meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from evald.config import KeepBest
from evald.errors import EvaldError, LedgerError, SnapshotGone
from evald.point import Kind, Outcome, PointKey, Snapshot
from evald.results.follow import read_records
from evald.results.modes import sync_dir
from evald.results.records import PointRecord, decode
from evald.staging.alerts import Alerting
from evald.staging.digest import fingerprint
from evald.staging.files import is_training_state, list_files, open_file
from evald.text import encode_json

log = structlog.get_logger(__name__)

RECORD_NAME = "evald_record.json"
LINK_NAME = "best"
_KEPT = re.compile(r"step_-?[0-9]+\.r[0-9]+(\.[0-9a-f]{8})?")
_HIDDEN = re.compile(r"\.tmp-.+\.[0-9a-f]{8}")
_CHUNK_BYTES = 8 << 20
#: the file system's own, and the record.
_MARGIN_BYTES = 16 << 20


class NotKept(EvaldError):
    """The best snapshot could not be copied; its point is not touched by that."""


class BestKeeper:
    """Compares each point that ends with the best snapshot of its run, and keeps the better one.

    ``results_file`` is the ledger, for points that ended in an earlier life. ``on_alert`` hears one
    sentence when a copy cannot be made. Points that are not ``ok`` and baselines do not compete.
    """

    def __init__(
        self,
        config: KeepBest,
        *,
        marker: str,
        results_file: Path,
        on_alert: Alerting | None = None,
    ) -> None:
        self._config = config
        self._marker = marker
        self._dir = Path(config.dir)
        self._results_file = results_file
        self._on_alert = on_alert
        self._lock = asyncio.Lock()
        self._told_missing = False
        #: a thread cannot be cancelled: it looks here.
        self._stop = threading.Event()

    def close(self) -> None:
        """Let a copy that is being made end early; the next life makes it."""
        self._stop.set()

    async def consider(self, record: PointRecord, snapshot: Snapshot) -> None:
        """Copy the snapshot of a point that has ended with ``record``, if it is the best so far."""
        if snapshot.weight_version is None:
            await self._keep(record, snapshot.directory, snapshot.fingerprint)

    async def consider_again(self, key: PointKey, directory: Path, expected: str) -> None:
        """Do the same for a point that ended in an earlier life, which may have died over it."""
        async with self._lock:
            try:
                record = await asyncio.to_thread(self._find, key)
            except (LedgerError, OSError) as error:
                log.debug("record_not_found", point=str(key), error=str(error))
                return
        if record is not None:
            await self._keep(record, directory, expected)

    async def _keep(self, record: PointRecord, directory: Path, expected: str) -> None:
        """Copy the directory if it holds the best snapshot; ``expected``: its fingerprint."""
        if record.outcome is not Outcome.OK or record.kind is not Kind.STEP:
            return
        value = record.metrics.get(self._config.metric, math.nan)
        if not math.isfinite(value):
            await self._tell_missing(record)
            return
        async with self._lock:
            try:
                kept = await asyncio.to_thread(self._copy, record, value, directory, expected)
            except NotKept as fault:
                await self._alert("best_not_kept", str(fault))
                return
        if kept is not None:
            log.info("best_kept", point=record.record_id, value=value, directory=str(kept))

    async def _tell_missing(self, record: PointRecord) -> None:
        if not self._told_missing:
            self._told_missing = True
            names = ", ".join(sorted(record.metrics))
            await self._alert(
                "best_not_known",
                f"cannot tell the best snapshot: {record.record_id} has no metric "
                f"{self._config.metric}; set keep_best.metric to one of {names}",
            )

    async def _alert(self, name: str, detail: str) -> None:
        log.warning(name, detail=detail)
        if self._on_alert is not None:
            await self._on_alert(name, detail)

    # --- blocking work -------------------------------------------------------------------------

    def _find(self, key: PointKey) -> PointRecord | None:
        for record in reversed(read_records(self._results_file)):
            if isinstance(record, PointRecord) and record.record_id == key.record_id:
                return record
        return None

    def _copy(
        self, record: PointRecord, value: float, directory: Path, expected: str
    ) -> Path | None:
        """Make it the best one if it is; raises NotKept."""
        place = self._dir / record.run
        name = f"step_{record.step}.r{record.revision}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._clean(place)
            if not self._is_better(value, place):
                return None
            if (place / name).exists():  # of another ledger
                name += f".{secrets.token_hex(4)}"
            hidden = _hidden(place, name)
            try:
                self._fill(hidden, directory, expected)
                _write(hidden / RECORD_NAME, partial(_write_all, encode_json(record)))
                sync_dir(hidden)
                hidden.rename(place / name)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
            fresh = _hidden(place, LINK_NAME)
            fresh.symlink_to(name)
            fresh.replace(place / LINK_NAME)
            sync_dir(place)
            self._clean(place)
        except (OSError, SnapshotGone) as error:
            cause = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise NotKept(
                f"cannot keep {directory}, the best snapshot by {self._config.metric} = {value:g}, "
                f"in {place}: {cause}; see to keep_best.dir"
            ) from error
        return place / name

    def _is_better(self, value: float, place: Path) -> bool:
        """Compare with the best one that is kept; equal is not better."""
        try:
            with open_file(place / LINK_NAME / RECORD_NAME) as file:
                before = decode(file.read())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return True  # none is kept, or nobody knows what it is
        if not isinstance(before, PointRecord) or self._config.metric not in before.metrics:
            return True  # by another metric
        best = before.metrics[self._config.metric]
        return value > best if self._config.rule == "max" else value < best

    def _fill(self, hidden: Path, directory: Path, expected: str) -> None:
        """Copy the files of a snapshot that is as it was; raises OSError, SnapshotGone."""
        if fingerprint(directory, self._marker)[0] != expected:
            raise SnapshotGone("it is no longer what was measured")
        files = [file for file in list_files(directory) if not is_training_state(file.name)]
        need = sum(file.size_bytes for file in files if file.is_regular) + _MARGIN_BYTES
        disk = os.statvfs(hidden.parent)
        if (free := disk.f_bavail * disk.f_frsize) < need:
            raise SnapshotGone(f"it takes {need} bytes, and {free} are free there")
        hidden.mkdir()
        for file in files:
            if not file.is_regular or file.name == RECORD_NAME:  # its own: it was a best one once
                continue
            target = hidden / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_file(file.path) as source:
                _write(target, partial(self._pour, source.fileno()))
        for folder in [path for path in hidden.rglob("*") if path.is_dir()]:
            sync_dir(folder)
        if fingerprint(directory, self._marker)[0] != expected:
            raise SnapshotGone("it changed while it was copied")

    def _pour(self, source: int, target: int) -> None:
        while chunk := os.read(source, _CHUNK_BYTES):
            if self._stop.is_set():
                raise SnapshotGone("the daemon stops; its next start copies it")
            _write_all(chunk, target)

    def _clean(self, place: Path) -> None:
        """Remove copies that were cut short, and what was the best one before."""
        link = place / LINK_NAME
        best = link.readlink().name if link.is_symlink() else ""
        for path in list(place.iterdir()):
            if _KEPT.fullmatch(path.name) and path.name != best and (path / RECORD_NAME).is_file():
                path = path.rename(_hidden(place, path.name))  # noqa: PLW2901 (nobody sees half)
            if not _HIDDEN.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _hidden(place: Path, name: str) -> Path:
    return place / f".tmp-{name}.{secrets.token_hex(4)}"


def _write_all(content: bytes, target: int) -> None:
    written = 0
    while written < len(content):  # a disk that is nearly full takes a part
        written += os.write(target, memoryview(content)[written:])


def _write(path: Path, fill: Callable[[int], object]) -> None:
    """Write a file of mode 0644 and sync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        fill(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
