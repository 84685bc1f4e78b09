"""The one writer of the ledger: locked, repaired, replayed, then appended to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path

import msgspec
import structlog

from evald.config import Results
from evald.errors import LedgerError
from evald.file_lock import hold_or_close
from evald.results.follow import REPAIR, decode_lines, is_json, split_lines
from evald.results.index import PointIndex, point_key
from evald.results.ledger_file import LedgerFile
from evald.results.locate import LEDGER_NAME
from evald.results.modes import Modes
from evald.results.pause import Pause
from evald.results.records import (
    Accepted,
    AnyRecord,
    Newer,
    PointRecord,
    RunEnd,
    SetRecord,
    decode,
)
from evald.results.segments import closed_segments
from evald.results.seq_mark import SeqMark
from evald.text import encode_json

log = structlog.get_logger(__name__)

LOCK_NAME = "results.lock"
#: what a torn tail held, kept for whoever wants to look; nothing reads it.
TORN_NAME = "results.torn"

IN_DOUBT = (
    "the newest line is in doubt, its write was cut short: restart the daemon, it goes on from "
    "what is really there"
)

_MIB = 1 << 20


class Ledger:
    """The daemon's durable memory of points; see :meth:`open`.

    A record that :meth:`append` confirmed is never lost to a killed daemon; ``accepted``,
    ``point`` and ``run_end`` records (and all before them) survive a power loss too.
    """

    def __init__(
        self,
        file: LedgerFile,
        *,
        lock: int,
        wall: Callable[[], float],
        pause: Pause,
        on_record: Callable[[AnyRecord], None],
    ) -> None:
        self.path = file.path
        self.index = PointIndex()
        #: seq of the newest record; 0 before the first.
        self.last_seq = 0
        self._file = file
        self._lock = lock
        self._wall = wall
        self._on_record = on_record
        #: evaluation pauses while records, or samples, cannot be written.
        self.pause = pause
        self._order = asyncio.Lock()
        #: a write has begun and nobody knows yet how it ended.
        self._in_doubt = False

    @classmethod
    def open(
        cls,
        config: Results,
        *,
        wall: Callable[[], float] = time.time,
        pause: Pause | None = None,
        on_record: Callable[[AnyRecord], None] = lambda _record: None,
    ) -> Ledger:
        """Create or take over the ledger in ``config.dir``: lock, repair a torn tail, replay.

        ``wall`` gives the seconds since the epoch for ``time``; ``pause`` hears of writes that
        fail, ``on_record`` of each record, first of those that are there. Blocks for the length of
        one read of all files. Raises LedgerError: the directory cannot be used, another daemon
        holds the lock, or a line before the last cannot be read.
        """
        modes = Modes.of(config)
        path = Path(config.dir) / LEDGER_NAME
        lock = -1
        file: LedgerFile | None = None
        try:
            modes.make_dirs(path.parent)
            lock = _take_lock(path.parent / LOCK_NAME, modes)
            mark = SeqMark(lock)
            file = LedgerFile(path, modes, rotate_bytes=int(config.rotate_mb * _MIB), mark=mark)
            ledger = cls(file, lock=lock, wall=wall, pause=pause or Pause(), on_record=on_record)
            ledger._replay(modes, mark)
        except (OSError, LedgerError) as fault:
            if file is not None:
                file.close()
            if lock >= 0:
                os.close(lock)
            if isinstance(fault, LedgerError):
                raise
            raise LedgerError(
                f"cannot open ledger {path}: {fault}; "
                "results.dir must be a directory that the daemon's user may write"
            ) from fault
        return ledger

    def close(self) -> None:
        """Wait for a write under way, then close the file and give up the lock."""
        if not self._file.is_closed:
            self._file.close()
            os.close(self._lock)

    async def append(self, record: AnyRecord) -> None:
        """Write ``record`` as one line; fills its ``seq`` and ``time``.

        Returns when the line is written, and for ``accepted``, ``point`` and ``run_end`` when the
        disk has confirmed it. While it cannot be written (no room, no rights, a failing disk) that
        is tried again every 2 seconds, for as long as it takes (``pause``), and records that follow
        wait, too.
        Cancellation waits for a write that has begun, then goes on; a record that was not written
        by then is not in the ledger. Raises LedgerError for a record that contradicts the ledger,
        and when somebody else has moved or changed its file.
        """
        async with self._order:
            refusal = IN_DOUBT if self._in_doubt else _contradiction(self.index, record)
            if refusal:
                raise LedgerError(f"cannot append {record.record_id} to {self.path}: {refusal}")
            record.seq = self.last_seq + 1
            record.time = self._wall()
            line = _encode(record)
            await self.pause.insist(self.path, lambda: self._uncut(self._attempt(record, line)))

    async def _attempt(self, record: AnyRecord, line: bytes) -> None:
        """Write once; raises OSError when it must be tried again."""
        durable = isinstance(record, Accepted | PointRecord | RunEnd)
        self._in_doubt = True  # for good, if this task is killed beside its thread
        try:
            await asyncio.to_thread(self._file.append, line, record.seq, durable=durable)
        except OSError:
            self._in_doubt = False
            raise
        self._in_doubt = False
        self.last_seq = record.seq
        self._take_in(record)

    def _take_in(self, record: AnyRecord) -> None:
        self.index.apply(record)
        self._on_record(record)

    async def _uncut(self, attempt: Coroutine[None, None, None]) -> None:
        """Let a write that has begun come to its end, also when this is cancelled."""
        writing = asyncio.create_task(attempt, name="ledger-append")
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            if not writing.cancelled() and (fault := writing.exception()) is not None:
                log.exception("ledger_append_failed", path=str(self.path), exc_info=fault)
            raise

    def _replay(self, modes: Modes, mark: SeqMark) -> None:
        """Read all files back into the index, after cutting a torn tail off."""
        for segment in closed_segments(self.path):
            with segment.path.open("rb") as file:
                self._replay_lines((line.removesuffix(b"\n") for line in file), segment.path)
        lines, torn = split_lines(self.path.read_bytes())
        if not torn and lines and not is_json(lines[-1]):
            torn = lines.pop() + b"\n"
        if torn:
            self._cut(torn, modes)
        self._replay_lines(lines, self.path)
        self._file.first_seq = self.last_seq - len(lines) + 1 if lines else 0
        if self.last_seq:
            mark.note(self.last_seq)
        else:  # a new ledger, or somebody has moved all files away
            self.last_seq = mark.read()

    def _replay_lines(self, lines: Iterable[bytes], path: Path) -> None:
        for number, record in enumerate(decode_lines(lines, path), start=1):
            if self.last_seq and record.seq != self.last_seq + 1:
                raise LedgerError(_gap(path, number, self.last_seq + 1, record.seq))
            self.last_seq = record.seq
            if isinstance(record, Newer):
                continue
            if contradiction := _contradiction(self.index, record):
                log.warning("ledger_contradiction", line=number, detail=contradiction)
            self._take_in(record)

    def _cut(self, torn: bytes, modes: Modes) -> None:
        """Cut ``torn`` off the end of the file; a copy goes to ``results.torn`` first."""
        copy = modes.open(self.path.parent / TORN_NAME, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(copy, torn.rstrip(b"\n") + b"\n")
            os.fsync(copy)
        finally:
            os.close(copy)
        self._file.cut(len(torn))
        log.warning("ledger_torn_tail_cut", path=str(self.path), bytes=len(torn), copy=TORN_NAME)


def _take_lock(path: Path, modes: Modes) -> int:
    """Lock ``path`` for the life of the process and write our pid into it; return its descriptor.

    The kernel drops the lock with the process, however that ends. Raises LedgerError, OSError.
    """
    descriptor = modes.open(path, os.O_RDWR)
    if (holder := hold_or_close(descriptor)) is not None:
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


def _gap(path: Path, number: int, following: int, seq: int) -> str:
    if number == 1 and seq > following:
        return (
            f"cannot read ledger {path}: the closed file with seq {following} to {seq - 1} is not "
            "beside it; put it back as it was, under its own name and not compressed"
        )
    return (
        f"cannot read ledger {path}: line {number} has seq {seq} where {following} must follow; "
        f"{REPAIR}"
    )


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
