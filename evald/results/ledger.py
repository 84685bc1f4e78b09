"""The one writer of ``results.jsonl``: locked, repaired, replayed, then appended to."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from evald.config import Results
from evald.errors import LedgerError
from evald.file_lock import hold
from evald.results.follow import REPAIR, decode_lines, is_json, split_lines
from evald.results.index import PointIndex, point_key
from evald.results.locate import LEDGER_NAME
from evald.results.modes import Modes, sync_dir
from evald.results.records import (
    Accepted,
    AnyRecord,
    Newer,
    PointRecord,
    RunEnd,
    SetRecord,
    decode,
)
from evald.text import encode_json

log = structlog.get_logger(__name__)

LOCK_NAME = "results.lock"
#: what a torn tail held, kept for whoever wants to look; nothing reads it.
TORN_NAME = "results.torn"

IN_DOUBT = (
    "the newest line is in doubt (it was cut short, or the disk did not confirm it): "
    "restart the daemon, it goes on from what is really there"
)


class Ledger:
    """The daemon's durable memory of points; see :meth:`open`.

    A record that :meth:`append` confirmed is never lost to a killed daemon; ``accepted``,
    ``point`` and ``run_end`` records (and all before them) survive a power loss too.
    """

    def __init__(
        self, path: Path, *, descriptor: int, lock: int, wall: Callable[[], float]
    ) -> None:
        self.path = path
        self.index = PointIndex()
        #: seq of the newest record; 0 while the ledger is empty.
        self.last_seq = 0
        self._descriptor = descriptor
        self._lock = lock
        self._wall = wall
        self._order = asyncio.Lock()
        #: held while a thread uses the descriptor, so that close() cannot pull it away.
        self._in_use = threading.Lock()
        #: a write has begun and nobody knows yet whether it happened.
        self._in_doubt = False

    @classmethod
    def open(cls, config: Results, *, wall: Callable[[], float] = time.time) -> Ledger:
        """Create or take over the ledger in ``config.dir``: lock, repair a torn tail, replay.

        ``wall`` gives the seconds since the epoch for ``time``. Blocks for the length of one read
        of the file. Raises LedgerError: the directory cannot be used, another daemon holds the
        lock, or a line before the last cannot be read.
        """
        modes = Modes.of(config)
        path = Path(config.dir) / LEDGER_NAME
        lock = descriptor = -1
        try:
            modes.make_dirs(path.parent)
            lock = _take_lock(path.parent / LOCK_NAME, modes)
            descriptor = modes.open(path, os.O_RDWR | os.O_APPEND)
            sync_dir(path.parent)
            ledger = cls(path, descriptor=descriptor, lock=lock, wall=wall)
            ledger._replay(modes)
        except (OSError, LedgerError) as fault:
            for opened in (descriptor, lock):
                if opened >= 0:
                    os.close(opened)
            if isinstance(fault, LedgerError):
                raise
            raise LedgerError(
                f"cannot open ledger {path}: {fault}; "
                "results.dir must be a directory that the daemon's user may write"
            ) from fault
        return ledger

    def close(self) -> None:
        """Wait for a write under way, then close the file and give up the lock."""
        with self._in_use:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                os.close(self._lock)
                self._descriptor = self._lock = -1

    async def append(self, record: AnyRecord) -> None:
        """Write ``record`` as one line; fills its ``seq`` and ``time``.

        Returns when the line is written, and for ``accepted``, ``point`` and ``run_end`` when the
        disk has confirmed it. Cancellation waits for a write that has begun, then goes on. Raises
        LedgerError, and then nothing was written, unless it says that the ledger is in doubt.
        """
        commit = asyncio.create_task(self._commit(record), name="ledger-append")
        try:
            await asyncio.shield(commit)
        except asyncio.CancelledError:
            await asyncio.wait({commit})
            if not commit.cancelled() and (fault := commit.exception()) is not None:
                log.exception("ledger_append_failed", record_id=record.record_id, exc_info=fault)
            raise

    async def _commit(self, record: AnyRecord) -> None:
        async with self._order:
            if refusal := self._refusal(record):
                raise LedgerError(f"cannot append {record.record_id} to {self.path}: {refusal}")
            record.seq = self.last_seq + 1
            record.time = self._wall()
            line = _encode(record)
            durable = isinstance(record, Accepted | PointRecord | RunEnd)
            # only a write that is known to have happened, or not, clears this again
            self._in_doubt = True
            try:
                undone = await asyncio.to_thread(self._write, line, durable=durable)
            except OSError as fault:
                raise LedgerError(
                    f"cannot append {record.record_id} to {self.path}: {fault}; {IN_DOUBT}"
                ) from fault
            self._in_doubt = False
            if undone is not None:
                raise LedgerError(
                    f"cannot append {record.record_id} to {self.path}: {undone}; "
                    "nothing was written: make room or repair the directory"
                ) from undone
            self.last_seq = record.seq
            self.index.apply(record)

    def _refusal(self, record: AnyRecord) -> str | None:
        """Return why ``record`` may not be appended, in words."""
        if self._descriptor < 0:
            return "the ledger is closed"
        if self._in_doubt:
            return IN_DOUBT
        return _contradiction(self.index, record)

    def _write(self, line: bytes, *, durable: bool) -> OSError | None:
        """Append ``line`` in one write; return the error of a write that was undone.

        Raises OSError when it cannot be known what the file holds now.
        """
        with self._in_use:
            try:
                here, there = os.fstat(self._descriptor), self.path.stat()
                if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                    return OSError("the file was replaced by another one while evald writes to it")
            except OSError as fault:  # moved away
                return fault
            undone = None
            try:
                if os.write(self._descriptor, line) != len(line):
                    undone = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as fault:
                undone = fault
            if undone is not None:
                os.ftruncate(self._descriptor, here.st_size)
                return undone
            if durable:
                os.fdatasync(self._descriptor)
            return None

    def _replay(self, modes: Modes) -> None:
        """Read the file back into the index, after cutting a torn tail off."""
        lines, torn = split_lines(self.path.read_bytes())
        if not torn and lines and not is_json(lines[-1]):
            torn = lines.pop() + b"\n"
        if torn:
            self._cut(torn, modes)
        for number, record in enumerate(decode_lines(lines, self.path), start=1):
            if self.last_seq and record.seq != self.last_seq + 1:
                raise LedgerError(
                    f"cannot read ledger {self.path}: line {number} has seq {record.seq} where "
                    f"{self.last_seq + 1} must follow; {REPAIR}"
                )
            self.last_seq = record.seq
            if isinstance(record, Newer):
                continue
            if contradiction := _contradiction(self.index, record):
                log.warning("ledger_contradiction", line=number, detail=contradiction)
            self.index.apply(record)

    def _cut(self, torn: bytes, modes: Modes) -> None:
        """Cut ``torn`` off the end of the file; a copy goes to ``results.torn`` first."""
        copy = modes.open(self.path.parent / TORN_NAME, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(copy, torn.rstrip(b"\n") + b"\n")
            os.fsync(copy)
        finally:
            os.close(copy)
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(torn))
        os.fsync(self._descriptor)
        log.warning("ledger_torn_tail_cut", path=str(self.path), bytes=len(torn), copy=TORN_NAME)


def _take_lock(path: Path, modes: Modes) -> int:
    """Lock ``path`` for the life of the process and write our pid into it; return its descriptor.

    The kernel drops the lock with the process, however that ends. Raises LedgerError, OSError.
    """
    descriptor = modes.open(path, os.O_RDWR)
    try:
        holder = hold(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if holder is not None:
        os.close(descriptor)
        raise LedgerError(
            f"cannot lock {path}: another evald (pid {holder}) writes to this results directory; "
            "stop it or choose another results.dir"
        )
    return descriptor


def _contradiction(index: PointIndex, record: AnyRecord) -> str | None:
    """Return why ``record`` cannot follow what ``index`` knows: a point ends exactly once."""
    if not isinstance(record, Accepted | SetRecord | PointRecord):
        return None
    state = index.get(point_key(record))
    if state is None or state.outcome is None:
        return None
    return f"point {state.key} has already ended {state.outcome.value} with seq {state.end_seq}"


def _encode(record: AnyRecord) -> bytes:
    """Return the line of ``record``; raises LedgerError for one that could not be read back.

    JSON has no NaN: it would be written as null, and the next start would stumble over the line.
    """
    line = encode_json(record)
    try:
        decode(line)
    except msgspec.DecodeError as fault:
        raise LedgerError(
            f"cannot append {record.record_id}: it cannot be read back: {fault}"
        ) from fault
    return line + b"\n"
