"""The words of a training job to evald: written now, or as soon as the file system lets it."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from evald.text import one_line
from evald.trainer.contract import trace_of
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.publish import end_run, skip, write_request

log = structlog.get_logger(__name__)

#: words that wait for room on the file system; the oldest beyond are lost, and said to be.
_KEPT = 1000


class Outbox:
    """Writes words into ``root``; with a ``courier`` they then travel to the eval node.

    A word that cannot be written (a full tmpfs) is no error: it is kept and written by a later
    :meth:`retry`, in order. One that nobody could ever write is dropped, and said to be.
    """

    def __init__(self, root: Path, *, pattern: str, courier: Courier | None) -> None:
        self._root = root
        self._pattern = pattern
        self._courier = courier
        self._kept: deque[tuple[str, Callable[[], Path]]] = deque()
        #: why the newest word waits.
        self.fault = ""

    @property
    def waiting(self) -> bool:
        """Whether any word is not written yet."""
        return bool(self._kept)

    def skip(self, step: int, reason: str, detail: str, *, run: str | None) -> None:
        """Say that the step gets no snapshot."""
        self._add(
            f"the skip of step {step}",
            functools.partial(
                skip,
                self._root,
                step,
                reason,
                one_line(detail),
                run=run,
                pattern=self._pattern,
            ),
        )

    def request(self, name: str, content: dict[str, Any], *, run: str | None) -> None:
        """Ask for a point that is no snapshot in the root."""
        self._add(
            f"request {name}",
            functools.partial(write_request, self._root, name, content, run=run),
        )

    def withdraw(self, name: str) -> None:
        """Take a request back, unless it has been read or has left by now."""
        self._kept = deque(one for one in self._kept if one[0] != f"request {name}")
        with contextlib.suppress(OSError):
            (self._root / f"{name}.request").unlink(missing_ok=True)

    def end_run(self, last_step: int, *, run: str | None) -> None:
        """Say that the run is over."""
        self._add("the run's end", functools.partial(end_run, self._root, last_step, run=run))

    def retry(self) -> None:
        """Write what is waiting, as far as it goes."""
        while self._kept:
            what, write = self._kept[0]
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                path = write()
            except OSError as error:
                if not self.fault:
                    log.warning("word_waits", what=what, root=str(self._root), detail=str(error))
                self.fault = str(error)
                return
            except Exception as error:  # noqa: BLE001
                # the boundary: a word that can never be written must not hold up those behind it
                self._kept.popleft()
                log.warning("word_lost", what=what, detail=str(error), trace=trace_of(error))
                continue
            self.fault = ""
            self._kept.popleft()
            if self._courier is not None:
                self._courier.add(path)

    def _add(self, what: str, write: Callable[[], Path]) -> None:
        if len(self._kept) >= _KEPT:
            lost, _ = self._kept.popleft()
            log.error("word_lost", what=lost, detail=f"{_KEPT} others wait for room behind it")
        self._kept.append((what, write))
        self.retry()
