"""One copy of a snapshot that is the best of its run: whole under its name, or not there.

``DIR/<run>/step_N.rR/`` holds its files, and the point's record as ``evald_record.json``;
``DIR/<run>/best`` is a link to it. The copy is made under a hidden name, synced and renamed; the
link turns to it at once, and only then the one before goes. So a reader of ``best`` always finds a
whole snapshot, whatever dies meanwhile. All of it happens in the run's own open folder: no link on
the way there is followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from evald.config import KeepBest
from evald.errors import EvaldError, SnapshotGone
from evald.results.modes import sync_dir
from evald.results.records import PointRecord, decode
from evald.staging.digest import fingerprint
from evald.staging.failing import fails_for_now
from evald.staging.files import is_training_state, list_files, open_file
from evald.staging.inside import own_folder
from evald.text import encode_json

log = structlog.get_logger(__name__)

RECORD_NAME = "evald_record.json"
LINK_NAME = "best"
#: beside it: by which rule it is the best one.
RULE_NAME = "best_by.txt"
_KEPT = re.compile(r"step_-?[0-9]+\.r[0-9]+(\.[0-9a-f]{8})?")
_HIDDEN = re.compile(r"\.tmp-.+\.[0-9a-f]{8}")
_CHUNK_BYTES = 8 << 20
#: the file system's own, and the record.
_MARGIN_BYTES = 16 << 20
#: another daemon's copy into the same folder is waited for so long, and then tried again later.
_TURN_S = 10.0
_LOOK_S = 0.1


class NotKept(EvaldError):
    """The best snapshot could not be copied; its point is not touched by that."""


class Lost(NotKept):
    """It never will be: its bytes are not what was measured, or its place is another's."""


class Best(msgspec.Struct, frozen=True):
    """The snapshot of a point that is the best of its run, by its ``value``."""

    record: PointRecord
    value: float
    directory: Path
    #: its fingerprint when it was measured.
    expected: str


class BestCopies:
    """Copies into ``config.dir``; every method but ``stop`` and ``beats`` blocks."""

    def __init__(self, config: KeepBest, marker: str) -> None:
        self._config = config
        self._marker = marker
        self._dir = Path(config.dir)
        self._by = f"{config.rule} {config.metric}"
        #: a thread cannot be cancelled: it looks here.
        self._stop = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether copies end early."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Let a copy that is being made end early."""
        self._stop.set()

    def beats(self, value: float, other: float) -> bool:
        """Compare two values by the rule; equal is not better."""
        return value > other if self._config.rule == "max" else value < other

    def make(self, one: Best) -> Path | None:
        """Make it the best one if it is; raises NotKept."""
        place = self._dir / one.record.run
        sentence = (
            f"cannot keep {one.directory}, the best snapshot by {self._config.metric} = "
            f"{one.value:g}, in {place}: "
        )
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            with own_folder(self._dir, one.record.run) as folder:
                _take_turn(folder, place, self._stop)
                name = self._put(one, Path(f"/proc/self/fd/{folder}"))
            return None if name is None else place / name
        except SnapshotGone as gone:
            kind = NotKept if fails_for_now(gone) else Lost
            raise kind(f"{sentence}{gone}") from gone
        except OSError as error:
            raise NotKept(
                f"{sentence}{error.strerror or error}; see to keep_best.dir: evald tries again, "
                "and until then an owned staging root holds the snapshot beside staging.keep others"
            ) from error

    def _put(self, one: Best, place: Path) -> str | None:
        """Copy it into its run's folder, if it is better than the one there; return its name."""
        self._clean(place)
        self._refuse_other_rule(one.record.run, place)
        if not self._is_better(one.value, place):
            return None
        name = f"step_{one.record.step}.r{one.record.revision}"
        if (place / name).exists():  # of another ledger
            name += f".{secrets.token_hex(4)}"
        hidden = _hidden(place, name)
        try:
            self._fill(hidden, one.directory, one.expected)
            _write(hidden / RECORD_NAME, partial(_write_all, encode_json(one.record)))
            sync_dir(hidden)
            hidden.rename(place / name)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        rule = _hidden(place, RULE_NAME)
        _write(rule, partial(_write_all, f"{self._by}\n".encode()))
        rule.replace(place / RULE_NAME)
        link = _hidden(place, LINK_NAME)
        link.symlink_to(name)
        link.replace(place / LINK_NAME)
        sync_dir(place)
        self._clean(place)
        return name

    def _refuse_other_rule(self, run: str, place: Path) -> None:
        """Raise Lost if the run's folder keeps the best one by another rule."""
        try:
            with open_file(place / RULE_NAME) as file:
                its = file.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return  # nothing was kept there yet
        if its != self._by:
            raise Lost(
                f"cannot keep the best snapshot by {self._by} in {self._dir / run}: it has the "
                f"best by {its}; choose another keep_best.dir, or delete "
                f"{self._dir / run / RULE_NAME}"
            )

    def _is_better(self, value: float, place: Path) -> bool:
        """Compare with the best one that is kept; equal is not better."""
        try:
            with open_file(place / LINK_NAME / RECORD_NAME) as file:
                before = decode(file.read())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return True  # none is kept, or nobody knows what it is
        if not isinstance(before, PointRecord) or self._config.metric not in before.metrics:
            return True  # by another metric
        return self.beats(value, before.metrics[self._config.metric])

    def _fill(self, hidden: Path, directory: Path, expected: str) -> None:
        """Copy the files of a snapshot that is as it was; raises OSError, SnapshotGone."""
        try:
            seen, _ = fingerprint(directory, self._marker)
        except FileNotFoundError as error:
            raise SnapshotGone("it has vanished") from error
        if seen != expected:
            raise SnapshotGone("it is no longer what was measured")
        files = [file for file in list_files(directory) if not is_training_state(file.name)]
        need = sum(file.size_bytes for file in files if file.is_regular) + _MARGIN_BYTES
        disk = os.statvfs(hidden.parent)
        if (free := disk.f_bavail * disk.f_frsize) < need:
            raise OSError(errno.ENOSPC, f"it takes {need} bytes, and {free} are free there")
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
                raise NotKept("cannot copy on: the daemon stops; its next start does it again")
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


def _take_turn(folder: int, place: Path, stop: threading.Event) -> None:
    """Keep out other daemons, until ``folder`` is closed.

    They would take a copy that is being made for one cut short. Raises BlockingIOError when one of
    them does not come to an end. A file system that knows no locks is used without.
    """
    deadline = time.monotonic() + _TURN_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if stop.wait(_LOOK_S) or time.monotonic() > deadline:
                told = "another evald copies a snapshot there"
                raise BlockingIOError(error.errno, told) from error
        except OSError as error:
            log.debug("best_not_locked", place=str(place), error=str(error))
            return
        else:
            return


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
