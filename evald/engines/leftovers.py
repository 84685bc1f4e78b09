"""What a killed daemon may leave: launchers, found again by the pid file beside each log."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from evald.engines import guard

log = structlog.get_logger(__name__)

PID_SUFFIX = ".pid"
#: how long a killed group may take to disappear.
KILL_TIMEOUT_S = 15.0
POLL_S = 0.02


class PidFile(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a launcher beyond doubt: process ids are used again, starts are not."""

    pid: int
    #: clock ticks from the machine's boot to the start of the process.
    start_ticks: int
    boot_id: str


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_file(log_path: Path) -> Path:
    """Return the pid file that belongs to an engine's log file."""
    return log_path.with_name(log_path.name + PID_SUFFIX)


def write_pid_file(log_path: Path, pid: int) -> None:
    """Write down the launcher ``pid``; nothing is written when it has ended already."""
    stat = guard.read_stat(pid)
    if stat is None:
        return
    content = PidFile(pid=pid, start_ticks=stat.start_ticks, boot_id=_boot_id())
    pid_file(log_path).write_bytes(msgspec.json.encode(content))


def group_members(group: int) -> list[int]:
    """Return the living members of a process group (a zombie is not one)."""
    return [
        pid
        for pid in guard.all_pids()
        if (stat := guard.read_stat(pid)) and stat.group == group and stat.state != "Z"
    ]


def kill_group(group: int, timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """SIGKILL a process group until it is empty; return what survives ``timeout_s``. Blocks."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        left = group_members(group)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def remove_memory(paths: Iterable[Path]) -> None:
    """Remove the shared memory of an engine of which nothing is left. Blocks."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def reap_leftovers(directory: Path) -> list[int]:
    """Kill the engines whose pid files lie below ``directory``; return their launchers' pids.

    For a new daemon, when the old one and its guards were killed together. A process is only
    killed when it started at the recorded moment and still leads its session. Blocks.
    """
    killed: list[int] = []
    for path in sorted(directory.rglob(f"*{PID_SUFFIX}")):
        try:
            recorded = msgspec.json.decode(path.read_bytes(), type=PidFile)
        except msgspec.DecodeError:
            recorded = None  # cut off by the crash, or not ours
        if recorded is not None and _is_alive(recorded):
            left = kill_group(recorded.pid)
            killed.append(recorded.pid)
            log.warning("engine_leftover_killed", pid=recorded.pid, file=str(path), left=left)
            if left:
                continue
        path.unlink(missing_ok=True)
    return killed


def _is_alive(recorded: PidFile) -> bool:
    stat = guard.read_stat(recorded.pid)
    return (
        stat is not None
        and recorded.boot_id == _boot_id()
        and stat.start_ticks == recorded.start_ticks
        and stat.session == recorded.pid
    )
