"""A stand-in for an engine's processes, and how to look at them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evald.engines.guard import read_stat

#: a stand-in for an engine: a launcher with children of the awkward kinds. Every process adds
#: "WORD PID" to the file in argv[1]; argv[2:] says what the launcher does.
TREE = r"""
import os, signal, sys, time

def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word} {os.getpid()}\n")

def sleep_for_ever(word):
    note(word)
    while True:
        time.sleep(60)

def fork(word, *, own_session=False, orphan=False):
    if os.fork():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if own_session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    sleep_for_ever(word)

behaviour = sys.argv[2:]
if "stubborn" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in behaviour:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if "children" in behaviour:
    fork("child")
    fork("session", own_session=True)
    fork("orphan", orphan=True)
    while len(open(sys.argv[1]).readlines()) < 3:
        time.sleep(0.01)
if "memory" in behaviour:
    import mmap
    for path in sys.argv[3].split(","):
        file = open(path, "w+b")
        file.truncate(4096)
        globals()[path] = mmap.mmap(file.fileno(), 4096)
print("hello from the engine", flush=True)
print("and its errors", file=sys.stderr, flush=True)
note("launcher")
if "exit3" in behaviour:
    sys.exit(3)
while True:
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Tree:
    """The stand-in's command line, and the processes that it has started."""

    def __init__(self, directory: Path) -> None:
        self.script = directory / "tree.py"
        self.script.write_text(TREE)
        self.notes = directory / "pids"
        self.notes.touch()

    def argv(self, *behaviour: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(self.script), str(self.notes), *behaviour]

    def pids(self) -> dict[str, int]:
        words = (line.split() for line in self.notes.read_text().splitlines())
        return {name: int(pid) for name, pid in words}

    def wait_started(self) -> dict[str, int]:
        assert wait_until(lambda: "launcher" in self.pids())
        return self.pids()

    def is_gone(self) -> bool:
        return not any(is_alive(pid) for pid in self.pids().values())

    def clean_up(self) -> None:
        """Kill what a failed test left."""
        for pid in self.pids().values():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The pid may be another's by now.
                if str(self.notes).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
