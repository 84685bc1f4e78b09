"""Named places in the daemon where it can be made to die, to stand still or to fail.

Wrapped from outside, in a process of the test: the product has no fault code.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

#: name -> module, and the function or method in it. ``.before`` and ``.after`` stand behind it.
POINTS = {
    "replay": "evald.results.ledger:Ledger._replay",
    "sweep": "evald.staging.retention:Retention.sweep",
    "recovery": "evald.staging.recovery:Recovery.run",
    "scan": "evald.staging.intake:scan",
    "look": "evald.staging.candidate:Reader.look",
    "judge": "evald.staging.candidate:Reader.judge",
    "offer": "evald.dispatch:Dispatcher.offer",
    "queue": "evald.dispatch:Dispatcher._queue_up",
    "append": "evald.results.ledger:Ledger.append",
    "write": "evald.results.ledger_file:LedgerFile.append",
    "rotate": "evald.results.ledger_file:LedgerFile._rotate",
    "fdatasync": "os:fdatasync",
    "prepare": "evald.measure:Measure._prepare",
    "digest": "evald.staging.candidate:content_digest",
    "engine_start": "evald.engines.process:EngineProcess.start",
    "engine_stop": "evald.engines.process:EngineProcess.stop",
    "load": "evald.engines.pin:Loading.load",
    "prove": "evald.engines.pin:Loading.prove",
    "generate": "evald.engines.api:EngineAPI.generate",
    "grade": "evald.evals.grading:Grading.grade",
    "journal": "evald.results.samples:SampleJournal.flush",
    "statistics": "evald.evals.statistics:Statistics.of_set",
    "set_done": "evald.measure:_Life.set_done",
    "record": "evald.dispatch:Dispatcher._record",
    "retire": "evald.staging.retention:Retention.retire",
    "consume": "evald.staging.retention:Retention.consume",
    "run_end": "evald.run_ends:RunEnds.settle",
    "board": "evald.status.board:Board._write",
    "rename": "os:rename",
    "replace": "os:replace",
    "unlink": "os:unlink",
    "rmdir": "os:rmdir",
    "drain": "evald.dispatch:Dispatcher.drain",
    "close": "evald.results.ledger:Ledger.close",
}
#: the ledger's line is written by half.
TORN = "torn"
#: begins the line that a point writes to standard error when it acts.
PASSED = "fault point"
LEDGER_LINE = b'{"type":"'
#: in the order of a point's life.
NAMES = [f"{name}.{when}" for name in POINTS for when in ("before", "after")] + [TORN]


def arm(spec: str) -> None:
    """Let the process act at a point: ``NAME:COUNT:ACTION``, at the COUNT-th time it comes by.

    Actions: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``slow`` (half a second), or the name of an
    errno.
    """
    name, count, action = spec.split(":")
    counter = _Counter(name, int(count), action)
    owner, function = find(name)
    if name == TORN:
        _arm_torn(counter)
    else:
        _wrap(owner, function, counter, before=name.endswith(".before"))


def find(name: str) -> tuple[Any, str]:
    """Return where the function of a point is, and its name; raises KeyError, AttributeError."""
    target = "os:write" if name == TORN else POINTS[name.rsplit(".", 1)[0]]
    module, path = target.split(":")
    owner: Any = importlib.import_module(module)
    *classes, function = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    inspect.getattr_static(owner, function)
    return owner, function


class _Counter:
    """Acts once, when it has been called often enough, and says so."""

    def __init__(self, name: str, count: int, action: str) -> None:
        self._name = name
        self._left = count
        self._action = action

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            print(f"{PASSED} {self._name}: {self._action}", file=sys.stderr, flush=True)
            act(self._action)


def act(action: str) -> None:
    """Do it now."""
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(0.5)
        case _:
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))


def _wrap(owner: Any, name: str, passed: Callable[[], None], *, before: bool) -> None:
    inner = inspect.getattr_static(owner, name)
    is_class_method = isinstance(inner, classmethod)
    function = inner.__func__ if is_class_method else inner

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before:
            passed()
        result = function(*args, **kwargs)
        if not before:
            passed()
        return result

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        if before:
            passed()
        try:
            return await function(*args, **kwargs)
        finally:
            if not before:
                passed()

    wrapped: Any = async_wrapper if asyncio.iscoroutinefunction(function) else wrapper
    if owner is os:  # who asks what it can do with directories' descriptors, asks for this one
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in able:
                able.add(wrapped)
    setattr(owner, name, classmethod(wrapped) if is_class_method else wrapped)


def _arm_torn(passed: Callable[[], None]) -> None:
    """Let half of a ledger's line be written, then act, then the other half."""
    whole = os.write

    def write(descriptor: int, content: Any) -> int:
        if not bytes(content).startswith(LEDGER_LINE):
            return whole(descriptor, content)
        half = len(content) // 2
        written = whole(descriptor, content[:half])
        passed()
        return written + whole(descriptor, content[half:])

    os.write = write
