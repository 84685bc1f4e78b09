"""Run rsync and ssh with a deadline, so that nothing of them outlives the push or its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.2
_REAP_S = 10.0
#: sets the parent-death signal, looks whether the parent died before that, becomes the program.
_TETHER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(75)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'cannot start {sys.argv[2]}: {error.strerror}')\n"
)


class Command(msgspec.Struct, frozen=True):
    """One program with its standard input."""

    args: list[str]
    stdin: bytes = b""


def tethered(args: Sequence[str]) -> list[str]:
    """Return a command line that ends with this process, however that dies.

    An orphan would go on writing into a directory that a second push believes to be its own.
    """
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *args]


class Done(msgspec.Struct, frozen=True):
    """How it ended; ``code`` is negative for a signal."""

    code: int
    out: str
    err: str


class _Child:
    """A running program; its output goes into memory, so that no pipe can fill up."""

    def __init__(self, command: Command, stack: ExitStack) -> None:
        stdin, self._out, self._err = (stack.enter_context(_memory()) for _ in range(3))
        stdin.write(command.stdin)
        stdin.seek(0)
        self.process = subprocess.Popen(  # noqa: S603 - the arguments are ours, no shell
            tethered(command.args),
            stdin=stdin,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},  # its messages are looked into
        )
        stack.callback(self.kill)

    def kill(self) -> None:
        """End it and what it has started, if it has not ended by itself."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(_REAP_S)

    def done(self) -> Done:
        """Tell how it ended."""
        self.process.wait(_REAP_S)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
        return Done(self.process.returncode, *texts)


def run_all(commands: Sequence[Command], deadline: float) -> list[Done]:
    """Run programs side by side until all have ended, or one has failed: then the others are ended.

    ``deadline``: of ``time.monotonic()``; TimeoutError when it is over, and everything is ended.
    """
    with ExitStack() as stack:
        children = [_Child(command, stack) for command in commands]
        pause_s = _FIRST_POLL_S
        while True:
            codes = [child.process.poll() for child in children]
            if None not in codes or any(codes):
                break
            if time.monotonic() >= deadline:
                raise TimeoutError("the deadline is over")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_POLL_S)
        for child in children:
            child.kill()
        return [child.done() for child in children]


def failed(done: Sequence[Done]) -> Done | None:
    """Return the one that failed by itself, if any; None: all went well."""
    bad = [one for one in done if one.code]
    return next((one for one in bad if one.code > 0), bad[0] if bad else None)


def _memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("evald-push"), "r+b")
