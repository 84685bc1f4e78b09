"""The demo's child processes: started with a log each, stopped with a deadline."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

#: what a killed process may take to disappear.
KILL_GRACE_S = 10.0
_TICK_S = 0.05


class Child:
    """One child process with its log file; it holds the demo's lock as long as it lives."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str], lock: int
    ) -> None:
        """Start ``command``; ``lock`` is the descriptor that it inherits."""
        self.name = name
        self.log = log
        with log.open("wb") as output:
            # a session of its own: Ctrl-C reaches the show, which then stops the children in order
            self._process = subprocess.Popen(  # noqa: S603 - our own modules, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=(lock,),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        self._process.send_signal(number)

    def last_words(self, count: int = 15) -> list[str]:
        """Return the last lines of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-count:]

    def failure(self) -> str:
        """Return how it ended, with the last lines of its log."""
        lines = "\n".join(f"    {line}" for line in self.last_words())
        return f"{self.name} ended with exit code {self.poll()}; the end of {self.log}:\n{lines}"


def stop_all(children: Iterable[Child], *, grace_s: float, hurry: Callable[[], bool]) -> list[str]:
    """Stop the children: SIGTERM, ``grace_s`` for all together, then SIGKILL.

    ``hurry`` cuts the grace short. Returns the names of those that had to be killed.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(c.poll() is None for c in running) and time.monotonic() < deadline and not hurry():
        time.sleep(_TICK_S)
    killed = [child for child in running if child.poll() is None]
    for child in killed:
        child.send(signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    while any(c.poll() is None for c in killed) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    return [child.name for child in killed]


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for processes that are not our children; return those still there after the time."""
    left = list(pids)
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in left if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    return left


def _alive(pid: int) -> bool:
    """Tell whether the process still runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


class Interruptions:
    """How often somebody asked the demo to stop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Count one signal."""
        self.count += 1


@contextmanager
def interruptions() -> Iterator[Interruptions]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them; restores the handlers."""
    counter = Interruptions()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, counter)) for number in numbers]
    try:
        yield counter
    finally:
        for number, handler in before:
            signal.signal(number, handler)
