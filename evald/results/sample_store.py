"""Samples do not grow for ever: those of ended points are compressed, and the oldest go."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from evald.config import Results
from evald.point import Kind, PointKey
from evald.pulse import Pulse
from evald.results.compressed import SUFFIX, compress
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.results.samples import point_samples_dir

log = structlog.get_logger(__name__)

#: seconds between two looks; a point's samples stay as they are for at least one.
LOOK_S = 60.0
#: one point's samples: gigabytes, on a slow disk.
_TIDY_S = 3600.0
_DAY_S = 86_400
_GB = 10**9


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a point: all their bytes, and when the newest was written (epoch, s)."""

    size_bytes: int
    time: float
    compressed: bool


class SampleStore:
    """Looks after ``samples/``; records in the ledger stay, whatever is deleted here.

    Never touched: points that have not ended (``is_open``: or are only just ending), what the next
    point of a run is compared with, and directories that are no point's.
    """

    def __init__(
        self, config: Results, *, index: PointIndex, is_open: Callable[[PointKey], bool]
    ) -> None:
        self._config = config
        self._results_dir = Path(config.dir)
        self._modes = Modes.of(config)
        self._index = index
        self._is_open = is_open
        #: ended points in order of their end, as at the last look.
        self._ended: list[PointKey] = []
        self._stored: dict[PointKey, _Stored] = {}
        self._gone: set[PointKey] = set()
        #: bytes of the samples of ended points, as of the last look; None: not looked at yet.
        self.stored_bytes: int | None = None
        self._stop = threading.Event()
        self._fault = ""
        self.pulse = Pulse("samples")

    async def run(self) -> None:
        """Look each minute, until cancelled."""
        while True:
            self.pulse.rest("waiting for the next look", LOOK_S + _TIDY_S)
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Compress what had ended at the look before this one; delete what is too old, too much."""
        settled = self._ended
        self._ended = [
            state.key for state in self._index.ended_points() if not self._is_open(state.key)
        ]
        compared = self._compared()
        try:
            await asyncio.to_thread(self._tidy, settled, compared)
        except OSError as error:
            if str(error) != self._fault:  # a lasting fault is told once
                log.warning("samples_not_tidied", error=str(error))
            self._fault = str(error)
        else:
            self._fault = ""
        if settled or not self._ended:  # the first look only learns which points there are
            self.stored_bytes = sum(one.size_bytes for one in self._stored.values())

    def close(self) -> None:
        """Let a look under way end early: a thread cannot be cancelled."""
        self._stop.set()

    def _compared(self) -> set[PointKey]:
        """Name the points that the next ones of runs that go on are compared with."""
        found = set()
        for run in {key.run for key in self._ended}:
            if not self._index.run_ended(run):
                newest = (self._index.measured(run, kind) for kind in Kind)
                found |= {state.key for state in newest if state is not None}
        return found

    def _tidy(self, settled: list[PointKey], compared: set[PointKey]) -> None:
        for key in settled:
            if key not in self._stored and key not in self._gone:
                self._measure(key)
        fault = None
        for key, one in list(self._stored.items()):
            self.pulse.rest("compressing", _TIDY_S)
            try:
                if not one.compressed:
                    self._compress(key)
            except OSError as error:  # one point's must not stand in the way of the others'
                fault = fault or error
        # a disk that is full needs it most
        for key in self._too_old(settled, compared):
            self.pulse.rest("deleting", _TIDY_S)
            self._delete(key)
        if fault is not None:
            raise fault

    def _too_old(self, settled: list[PointKey], compared: set[PointKey]) -> list[PointKey]:
        """Return what is older than it may be, and the oldest of what is too much."""
        stored = [(key, self._stored[key]) for key in settled if key in self._stored]
        limit_days, limit_bytes = self._config.samples_keep_days, self._config.samples_max_gb * _GB
        # of all clocks only this one goes on while the machine is off
        oldest = time.time() - limit_days * _DAY_S if limit_days else 0.0
        too_much = sum(one.size_bytes for _, one in stored) - limit_bytes if limit_bytes else 0.0
        found = []
        for key, one in stored:
            if key not in compared and (too_much > 0 or one.time < oldest):
                found.append(key)
                too_much -= one.size_bytes
        return found

    def _measure(self, key: PointKey) -> None:
        files = _files(self._directory(key))
        status = [path.stat() for path in files]
        if not status:
            self._gone.add(key)
            self._stored.pop(key, None)
            return
        self._stored[key] = _Stored(
            size_bytes=sum(one.st_size for one in status),
            time=max(one.st_mtime for one in status),
            compressed=all(path.suffix == SUFFIX for path in files),
        )

    def _compress(self, key: PointKey) -> None:
        for path in _files(self._directory(key)):
            if path.suffix != SUFFIX and not compress(path, self._modes, self._stop.is_set):
                return
        self._measure(key)

    def _delete(self, key: PointKey) -> None:
        directory = self._directory(key)
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)
        one = self._stored.pop(key)
        self._gone.add(key)
        log.info("samples_deleted", point=str(key), bytes=one.size_bytes)

    def _directory(self, key: PointKey) -> Path:
        return point_samples_dir(self._results_dir, key)


def _files(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []
