"""How long points have had so far, over all lives of the daemon: their deadlines go by that.

Else a daemon that is killed again and again would begin each deadline anew, and its point would
never end. Only time in which evald worked on the point counts: not while it was down (so clocks may
jump), nor while results could not be written. Each life counts at least a second.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from evald.config import Results
from evald.point import PointKey
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.results.pause import Pause

log = structlog.get_logger(__name__)

NAME = "time_used.json"
#: seconds between two notes; each is of the time at the next one, which may never come.
INTERVAL_S = 1.0
#: of the point itself, beside those of its eval sets.
_POINT = ""
_MAX_BYTES = 1 << 20


class PointTime:
    """The time of one point: ``earlier`` in the lives before, and what runs in this one."""

    def __init__(self, earlier: dict[str, float], pause: Pause) -> None:
        self._earlier = earlier
        self._pause = pause
        self._began: dict[str, float] = {}
        self._used_s = self.begin(_POINT)

    @property
    def used_s(self) -> float:
        """Seconds that the point has had in earlier lives."""
        return self._used_s

    def begin(self, name: str) -> float:
        """Let the time of an eval set count from now; returns its seconds in earlier lives."""
        self._began[name] = self._now()
        return self._earlier.get(name, 0.0)

    def end(self, name: str) -> None:
        """Let it count no more: the set is done."""
        if name in self._began:
            self._earlier = self._earlier | {name: self.so_far()[name]}
            del self._began[name]

    def so_far(self, ahead_s: float = 0.0) -> dict[str, float]:
        """Return all seconds by name; ``ahead_s``: those that run are so much further."""
        now = self._now() + ahead_s
        running = {
            name: self._earlier.get(name, 0.0) + now - began for name, began in self._began.items()
        }
        return self._earlier | running

    def _now(self) -> float:
        return time.monotonic() - self._pause.total_s


class TimeUsed:
    """Keeps the times of open points in a file of the results directory.

    A file that cannot be read or written costs what it would have said, and nothing else.
    """

    def __init__(self, config: Results, *, index: PointIndex, pause: Pause) -> None:
        """Read what earlier lives have noted of the points that are open now. Blocks shortly."""
        self._path = Path(config.dir) / NAME
        self._modes = Modes.of(config)
        self._index = index
        self._pause = pause
        noted = self._read()
        self._used = {
            state.key: noted[state.key.record_id]
            for state in index.open_points()
            if state.key.record_id in noted
        }
        self._running: dict[PointKey, PointTime] = {}
        #: a thread cannot be cancelled: the next one waits for it.
        self._writing = threading.Lock()
        self._fault = ""

    @asynccontextmanager
    async def of(self, key: PointKey) -> AsyncIterator[PointTime]:
        """Give the time of a point, which counts, and is noted each second, within the block."""
        one = self._running[key] = PointTime(self._used.get(key, {}), self._pause)
        noting = asyncio.create_task(self._note(), name=f"time of {key}")
        try:
            yield one
        finally:
            self._used[key] = one.so_far()
            del self._running[key]
            noting.cancel()
            await asyncio.wait([noting])

    async def _note(self) -> None:
        while True:
            await asyncio.to_thread(self._write, self._content())
            await asyncio.sleep(INTERVAL_S)

    def _content(self) -> bytes:
        for key in [key for key in self._used if self._has_ended(key)]:
            del self._used[key]
        running = {key: one.so_far(INTERVAL_S) for key, one in self._running.items()}
        times = {key.record_id: used for key, used in (self._used | running).items()}
        return msgspec.json.encode(times) + b"\n"

    def _has_ended(self, key: PointKey) -> bool:
        state = self._index.get(key)
        return state is not None and state.outcome is not None

    # --- blocking ------------------------------------------------------------------------------

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=dict[str, dict[str, float]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("time_used_not_read", path=str(self._path), error=str(error))
            return {}

    def _write(self, content: bytes) -> None:
        fresh = self._path.with_name(f".{NAME}.new")
        with self._writing:
            try:
                descriptor = self._modes.open(fresh, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
                try:
                    written = os.write(descriptor, content)
                finally:
                    os.close(descriptor)
                if written == len(content):
                    fresh.replace(self._path)
            except OSError as error:  # a full disk: evaluation pauses for it elsewhere
                if str(error) != self._fault:
                    log.warning("time_used_not_noted", path=str(self._path), error=str(error))
                self._fault = str(error)
            else:
                self._fault = ""
