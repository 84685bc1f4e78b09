"""Whether snapshots are loaded by evald's own loader in the engines, and whether memory lasts.

``evald/engine_plugin`` puts the loader into SGLang, and into the message of each update what it
did and how much memory the GPU has left then.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec
import structlog

from evald.engines.api import EngineAPI

log = structlog.get_logger(__name__)

#: load formats of SGLang: its own loader, and the one that the plugin takes over. Without the
#: plugin both are SGLang's own.
PLAIN, FAST = "auto", "safetensors"
#: of the tries in the test, each after the other; memory is compared from the first to the last.
TRIES = 2
#: GPU memory that comes and goes without a leak.
NOISE_BYTES = 256 << 20
#: memory lost since an engine's first pin that is a leak: this, or this share of what was free.
LEAK_BYTES, LEAK_SHARE = 2 << 30, 0.5
#: snapshots that one loader or both have failed on, and that are remembered.
FAILED_KEPT = 64
#: what the plugin adds to a message, once for each data parallel rank.
_NOTE = re.compile(r"evald_fast_load:(?: (\d+) bytes read;)?(?: (\d+) bytes free;)?")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the message of an update says."""

    #: the plugin read the snapshot.
    fast: bool
    #: memory that the GPU had left; None: it is not said.
    free_bytes: int | None


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """One update that succeeded, by the server's own word."""

    load_format: str
    report: Report
    update_s: float


def read_report(message: str) -> Report:
    """Read the message of an update that succeeded."""
    notes = _NOTE.findall(message)
    free = [int(free) for _, free in notes if free]
    fast = bool(notes) and all(read for read, _ in notes)
    return Report(fast=fast, free_bytes=min(free, default=None))


class Updates(Protocol):
    """Updates a fresh engine with the very weights it has."""

    async def update(self, load_format: str) -> Loaded:
        """Load them once; raises PinFailed."""

    async def checksum(self) -> str:
        """Return the checksum of what is loaded; raises EngineError."""


class MemoryWatch:
    """Sees whether the updates of one server take memory and do not give it back."""

    def __init__(self) -> None:
        self._first: int | None = None
        self.leaking = ""

    def look(self, free_bytes: int | None) -> str:
        """Take in what was left after a pin; the sentence that tells of a leak, once."""
        if free_bytes is None or self.leaking:
            return ""
        if self._first is None:
            self._first = free_bytes
        lost = self._first - free_bytes
        if lost > min(LEAK_BYTES, LEAK_SHARE * self._first):
            self.leaking = (
                f"its GPU had {self._first / 1e9:.1f} GB of memory left after its first pin and "
                f"has {free_bytes / 1e9:.1f} GB now: loading a snapshot takes memory for good"
            )
        return self.leaking


class FastPin:
    """The choice of the loader for the engines of one group: the fast one, while nothing is wrong.

    ``mode``: see ``Fleet.fast_pin``. It is off until ``test`` has found it right. ``on_leak`` is
    awaited with a sentence when loading turns out to take memory for good, whichever the loader.
    """

    def __init__(
        self,
        mode: Literal["auto", "on", "off"],
        *,
        on_leak: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.mode = mode
        self.on = False
        self.wanted = mode != "off"
        #: digests that the fast loader has failed on.
        self._failed: set[str] = set()
        self._on_leak = on_leak
        #: for each server that was pinned.
        self._memory: weakref.WeakKeyDictionary[EngineAPI, MemoryWatch] = (
            weakref.WeakKeyDictionary()
        )

    def format(self, digest: str, plain: str) -> str:
        """Return the load format for a snapshot; ``plain``: the engine's own."""
        return FAST if self.on and digest not in self._failed else plain

    async def test(self, updates: Updates, checksum: str, plain_s: float) -> str:
        """Try the fast loader, where SGLang's own took ``plain_s`` and led to ``checksum``.

        Returns what is wrong with it, or "". Raises EngineError or PinFailed.
        """
        self.wanted = False
        free = []
        # the first one makes room for the others
        for _ in range(TRIES):
            loaded = await updates.update(FAST)
            if not loaded.report.fast:
                return "the engine did not use it: its SGLang takes no plugins, or not this one"
            free.append(loaded.report.free_bytes)
        after, fast_s = await updates.checksum(), loaded.update_s
        if after != checksum:
            return f"its checksum is {after[:12]} instead of {checksum[:12]}"
        if self.mode == "auto" and fast_s >= plain_s:
            return f"it took {fast_s:.3f} s and SGLang's own loader {plain_s:.3f} s"
        if self.mode == "auto" and None in free:
            return "it cannot be told how much memory it leaves"
        known = [size for size in free if size is not None]
        if known and known[0] - known[-1] > NOISE_BYTES:
            return f"one update lost {(known[0] - known[-1]) / 1e9:.1f} GB of memory"
        self.on = True
        log.info("fast_pin", on=True, fast_s=round(fast_s, 3), plain_s=round(plain_s, 3))
        return ""

    def failed(self, digest: str) -> None:
        """Note that a pin failed: the next try on this snapshot is with SGLang's own loader."""
        if self.on:
            if len(self._failed) >= FAILED_KEPT:
                self._failed.clear()
            self._failed.add(digest)

    async def worked(self, api: EngineAPI, digest: str, loaded: Loaded, *, engine: str) -> None:
        """Learn from a pin that was proven."""
        if loaded.report.fast:
            self._failed.discard(digest)
        elif self.on and loaded.load_format == FAST:
            self.end("an engine did not use it")
        elif self.on and digest in self._failed:
            self.end("it failed on a snapshot that SGLang's own loader could load")
        leak = self._memory.setdefault(api, MemoryWatch()).look(loaded.report.free_bytes)
        if leak:
            log.warning("pin_memory_leak", engine=engine, detail=leak)
            if self.on:
                self.end(leak)
            if self._on_leak is not None:
                await self._on_leak(f"engine {engine}: {leak}")

    def leaking(self, api: EngineAPI) -> str:
        """Say what memory the server has lost: it is better not loaded again. Empty: none."""
        watch = self._memory.get(api)
        return "" if watch is None else watch.leaking

    def end(self, why: str) -> None:
        """Leave loading to SGLang's own loader from now on."""
        asked_for = self.on or self.mode == "on"
        self.on = self.wanted = False
        (log.warning if asked_for else log.info)("fast_pin", on=False, why=why)
