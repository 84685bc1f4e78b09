"""A program at the far end that holds something for us for as long as it runs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress

from evald.trainer.push.process import tethered

_END_S = 10.0
_MAX_BYTES = 1 << 16


class Holder:
    """Runs ``args`` until ``end``, or until this process dies.

    It says one of ``words``, with more behind it, on a line of its own, and goes on until its
    standard input ends.
    """

    def __init__(self, args: list[str], words: Collection[str], deadline: float) -> None:
        """Start it and wait for its line; ``said`` is "" when it ended, or was late, without."""
        self._process = subprocess.Popen(  # noqa: S603 - the arguments are ours, no shell
            tethered(args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.said = self._first_of(words, deadline)

    def _first_of(self, words: Collection[str], deadline: float) -> str:
        stdout = self._process.stdout
        if stdout is None:
            return ""
        said = b""
        while len(said) < _MAX_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                return ""
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                return ""
            said += chunk
            for line in said.split(b"\n")[:-1]:  # a login shell may say something of its own first
                text = line.decode(errors="replace")
                if text.partition(" ")[0] in words:
                    return text
        return ""

    def end(self) -> None:
        """Let go of what it holds."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_S)
