"""Evaluation pauses while results cannot be written, and goes on when they can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: how often a write that failed is tried again.
LOOK_AGAIN_S = 2.0


class Pause:
    """Tries again what cannot be written, and tells everybody else to wait: ``why``, ``over``.

    There is no end to that but success or cancellation: results are never given up for a disk
    that is full. Belongs to one event loop.
    """

    def __init__(self) -> None:
        #: by file that could not be written: one sentence.
        self._faults: dict[Path, str] = {}
        self._since_s = 0.0
        self._ended_s = 0.0
        self._over = asyncio.Event()
        self._over.set()

    @property
    def why(self) -> str:
        """One sentence; empty while everything can be written."""
        return next(iter(self._faults.values()), "")

    @property
    def total_s(self) -> float:
        """Seconds that all pauses together have taken so far."""
        running_s = time.monotonic() - self._since_s if self._faults else 0.0
        return self._ended_s + running_s

    async def over(self) -> None:
        """Wait until everything can be written; as long as that takes."""
        await self._over.wait()

    async def insist(self, path: Path, write: Callable[[], Awaitable[T]]) -> T:
        """Return what ``write`` returns, to ``path``; after each OSError it is tried again."""
        try:
            while True:
                try:
                    return await write()
                except OSError as error:
                    self._begin(path, error)
                await asyncio.sleep(LOOK_AGAIN_S)
        finally:
            self._end(path)

    def _begin(self, path: Path, error: OSError) -> None:
        sentence = (
            f"cannot write {path}: {error.strerror or error}; make room, or correct the rights: "
            "evaluation then goes on"
        )
        if not self._faults:
            self._since_s = time.monotonic()
            self._over.clear()
        if self._faults.get(path) != sentence:
            log.error("results_not_written", detail=sentence)
        self._faults[path] = sentence

    def _end(self, path: Path) -> None:
        if self._faults.pop(path, None) is None or self._faults:
            return
        paused_s = time.monotonic() - self._since_s
        self._ended_s += paused_s
        self._over.set()
        log.info("results_written_again", paused_s=round(paused_s, 3))
