"""What a fake engine does instead of working, as a test has scripted it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
from collections import defaultdict, deque
from pathlib import Path

from aiohttp import web

#: how a trickle comes: a piece of this many bytes, then this long nothing, seconds.
TRICKLE_BYTES, TRICKLE_S = 64, 0.02


class Fault(enum.StrEnum):
    """What a scripted request does instead of working."""

    #: the process dies, the connection drops.
    DIE = "die"
    #: the connection drops.
    DROP = "drop"
    #: 400.
    REJECT = "reject"
    #: 503.
    BUSY = "busy"
    #: 429.
    TOO_MANY = "too_many"
    #: 500.
    FAIL = "fail"
    #: the right answer comes a few bytes at a time.
    TRICKLE = "trickle"
    #: half of the right answer comes, then the connection drops.
    CUT = "cut"
    #: no answer until the client gives up.
    HANG = "hang"
    #: update: loads, but keeps the old label; generate: answers carry another label.
    WRONG_LABEL = "wrong_label"
    #: update: answers success, loads nothing, takes the label.
    LABEL_ONLY = "label_only"
    #: update: loads, and changes a value on the way (as a broken loader of quantized weights).
    OTHER_WEIGHTS = "other_weights"
    #: generate: what comes is the answer to another request.
    WRONG_RID = "wrong_rid"
    #: generate: HTTP 200 with a partial text and finish reason "abort".
    ABORT = "abort"
    #: generate: log-probabilities are null.
    NAN = "nan"


#: these may happen to any request.
GENERAL = (
    *(Fault.DIE, Fault.DROP, Fault.REJECT, Fault.BUSY, Fault.TOO_MANY, Fault.FAIL, Fault.HANG),
    *(Fault.TRICKLE, Fault.CUT),
)
STATUS = {Fault.REJECT: 400, Fault.TOO_MANY: 429, Fault.FAIL: 500, Fault.BUSY: 503}


class FaultScript:
    """The faults of the next requests, by path.

    ``file``: JSON, path -> names of faults, which another process writes by rename; whichever
    engine sees it first takes it.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)

    def add(self, path: str, *faults: Fault) -> None:
        """Make the next requests to ``path`` fail, one fault each."""
        self._faults[path].extend(faults)

    def take(self, path: str, *which: Fault) -> Fault | None:
        """Take the next fault of ``path`` if it is one of ``which``."""
        faults = self._faults[path]
        return faults.popleft() if faults and faults[0] in which else None

    def read_file(self) -> None:
        """Take in what another process has scripted."""
        if self._file is None or not self._file.exists():
            return
        mine = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another engine was first
            self._file.rename(mine)
            for path, names in json.loads(mine.read_bytes()).items():
                self.add(path, *[Fault(name) for name in names])


def drop(request: web.Request) -> web.Response:
    """Cut the connection of a request."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def in_pieces(request: web.Request, whole: web.Response, *, cut: bool) -> web.StreamResponse:
    """Send an answer slowly, or half of it."""
    body = whole.body if isinstance(whole.body, bytes) else b""
    pieces = web.StreamResponse(status=whole.status, headers={"Content-Type": "application/json"})
    pieces.content_length = len(body)
    await pieces.prepare(request)
    if cut:
        await pieces.write(body[: len(body) // 2])
        return drop(request)
    for start in range(0, len(body), TRICKLE_BYTES):
        await pieces.write(body[start : start + TRICKLE_BYTES])
        await asyncio.sleep(TRICKLE_S)
    await pieces.write_eof()
    return pieces
