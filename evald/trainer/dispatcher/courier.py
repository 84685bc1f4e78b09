"""Carries what was published in a local spool to the eval node, in order, in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import structlog

from evald.errors import EvaldError
from evald.trainer.contract import Carrier, ExportError, NoSpace, PushError, trace_of
from evald.trainer.dispatcher.staged import remove

log = structlog.get_logger(__name__)

#: a carrier has its own deadline and resumes: these are whole further tries.
_SNAPSHOT_TRIES = 3
#: a word is all that is left of a step: with the pauses below about a quarter of an hour.
_WORD_TRIES = 20
#: so many tries in vain, and nothing else since: the far end is not there.
_UNREACHABLE_AFTER = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@runtime_checkable
class _Tidy(Protocol):
    """A carrier that can remove what is left at the far end of a transfer that was given up."""

    def discard(self, path: Path) -> None:
        """Remove it; raises PushError."""
        ...


class Carried(msgspec.Struct, frozen=True):
    """What became of one thing; ``error`` None: it arrived."""

    path: Path
    #: of a snapshot; None: a word.
    step: int | None
    error: ExportError | None


class Courier:
    """One thread, one thing at a time, first in, first out.

    What has arrived is removed from ``root``, and so is a snapshot that is given up: the spool
    never fills with what nobody waits for.
    """

    def __init__(self, carrier: Carrier, root: Path, *, marker: str) -> None:
        self._carrier = carrier
        self._root = root
        self._marker = marker
        self._first_pause_s = _FIRST_PAUSE_S
        self._waiting: deque[tuple[Path, int | None]] = deque()
        self._done: deque[Carried] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        #: tries in vain since the far end was last reached.
        self._failures = 0

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        with self._changed:
            return bool(self._waiting)

    @property
    def unreachable(self) -> bool:
        """Whether something is on its way, and the newest tries have not reached the far end."""
        with self._changed:
            return bool(self._waiting) and self._failures >= _UNREACHABLE_AFTER

    def add(self, path: Path, *, step: int | None = None) -> None:
        """Take a word, or the snapshot of ``step``, on the way; returns at once."""
        with self._changed:
            if (path, step) in self._waiting and step is None:
                return  # the same word, rewritten: what is read when its turn comes counts
            self._waiting.append((path, step))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evald courier", daemon=True)
                self._thread.start()

    def settled(self) -> list[Carried]:
        """Return what has come to its end since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def close(self, timeout_s: float) -> bool:
        """Carry what is left, at most for ``timeout_s``; False when something stays behind.

        It stays in the spool: the next life of the job takes it from there. A far end that cannot
        be reached is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting and self._failures < _UNREACHABLE_AFTER:
                if (left_s := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            empty = not self._waiting
            self._closing.set()
            self._changed.notify_all()
        if empty and self._thread is not None:
            self._thread.join(max(deadline - time.monotonic(), 1.0))
        return empty

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing.is_set():
                        return
                    self._changed.wait()
                path, step = self._waiting[0]
            if self._closing.is_set():
                return
            error = self._carry(path, step)
            if self._closing.is_set() and error is not None:
                return  # cut short, not failed
            if error is not None and step is not None:
                self._discard(path)
            if error is None or step is not None:
                self._clear(path)
            with self._changed:
                self._waiting.popleft()
                self._done.append(Carried(path, step, error))
                self._changed.notify_all()

    def _carry(self, path: Path, step: int | None) -> ExportError | None:
        """Try until it arrives; returns why it did not."""
        pause_s = self._first_pause_s
        tries = _WORD_TRIES if step is None else _SNAPSHOT_TRIES
        while True:
            tries -= 1
            if not path.exists():
                # a word that was rewritten while its first form was on the way went with that
                gone = PushError(f"cannot carry {path}: it is not there any more")
                return None if step is None else gone
            error = self._try(path)
            with self._changed:
                reached = error is None or isinstance(error, NoSpace)
                self._failures = 0 if reached else self._failures + 1
                self._changed.notify_all()
            # a far end that is full is the point's fate, and tells the trainer the reason
            hopeless = isinstance(error, NoSpace) and step is not None
            if error is None or tries == 0 or hopeless:
                return error
            log.warning("carry_tried_in_vain", path=str(path), detail=str(error), tries_left=tries)
            if self._closing.wait(pause_s):
                return error
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _try(self, path: Path) -> ExportError | None:
        try:
            self._carrier.carry(path)
        except ExportError as error:
            return error
        except (EvaldError, OSError) as error:
            return PushError(str(error))
        except Exception as error:  # noqa: BLE001
            # the boundary: a carrier of the user's must not end the thread that all points wait for
            log.warning("carrier_failed", path=str(path), trace=trace_of(error))
            return PushError(f"cannot carry {path}: {type(error).__name__}: {error}")
        return None

    def _discard(self, path: Path) -> None:
        if isinstance(self._carrier, _Tidy):
            try:
                self._carrier.discard(path)
            except EvaldError as error:
                log.warning("far_end_not_cleared", path=str(path), detail=str(error))

    def _clear(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            try:
                remove(path, self._root, self._marker)
            except OSError as error:
                log.warning("spool_not_cleared", path=str(path), detail=str(error))
