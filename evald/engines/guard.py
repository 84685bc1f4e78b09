"""The resident guard of one engine: a small process that outlives neither engine nor daemon.

Run by path, standard library only: ``python -I -S guard.py LOGFILE -- ARGV...``, in a session of
its own. Standard input is the lifeline: the daemon holds the other end, and its EOF (the daemon is
gone, however it died) kills the whole tree at once. The guard is a child subreaper: whatever the
engine orphans becomes the guard's own child and cannot escape.

Lines to the daemon: ``started PID`` or ``failed REASON``, ``memory PATH`` (shared memory that the
engine may leave behind), ``exited RETURNCODE`` (the launcher), ``gone`` (nothing of the engine is
left; the guard ends). Line from the daemon: ``stop GRACE_S``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: longest sleep between two looks, seconds: no wait here depends on an event alone.
STEP_S = 0.5
#: first sleep between two rounds of killing, seconds; doubles up to STEP_S.
KILL_STEP_S = 0.005
#: shell convention for "could not be executed".
EXEC_FAILED = 127
#: seconds between two looks at the shared memory of the engine, while no file of it comes or goes.
MEMORY_STEP_S = 10.0
#: looks, STEP_S apart, once one has: a file is there a moment before its owner maps it.
MEMORY_LOOKS = 3
#: where it lies, and how the names begin that SGLang, NCCL and Python leave behind when killed.
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (POSIX shared memory, no temporary file of ours)
LEAKING = ("sglang_loads_", "sgl_shm_", "cuda.shm.", "nccl-", "psm_", "sem.mp-")
DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def _ignore(_signum: int, _frame: object) -> None:
    """Do nothing: a handler, unlike SIG_IGN, is not inherited by the engine."""


def _say(line: str) -> None:
    # A daemon that no longer reads is handled by the lifeline.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


class Stat(NamedTuple):
    """What the kernel says about a process."""

    #: one letter; "Z" has ended and waits for its parent.
    state: str
    parent: int
    group: int
    session: int
    #: clock ticks from the machine's boot to the start of the process.
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """Look at one process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (pathlib costs start-up time)
            # The command name may hold spaces and parentheses: fields start after the last one.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None  # ended, perhaps while we looked
    parent, group, session = map(int, fields[1:4])
    return Stat(fields[0].decode(), parent, group, session, int(fields[19]))


def all_pids() -> list[int]:
    """Return every process id that /proc shows, zombies included."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 (as above)


def descendants(root: int) -> list[int]:
    """Return every process below ``root``, zombies included, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def shared_memory(pid: int) -> set[str]:
    """Return the shared memory files of LEAKING names that a process has mapped."""
    found: set[str] = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (as above)
            for line in file:
                path = line.rstrip("\n").partition(SHARED_MEMORY)[2]
                # no slash: a snapshot lies in a directory of its own, and is nothing of ours
                if path.startswith(LEAKING) and "/" not in path:
                    found.add(SHARED_MEMORY + path.removesuffix(" (deleted)"))
    except OSError:
        return set()  # it has ended
    return found


class Guard:
    """One engine under guard: launcher, process group and everything they start."""

    def __init__(self, argv: list[str], log_fd: int) -> None:
        self.argv = argv
        self.log_fd = log_fd
        self.pid = 0
        self.launcher_exited = False
        self.memory: set[str] = set()
        self.memory_changed_ns = -1
        self.memory_looks = 0
        self.memory_look_at = 0.0

    def start(self) -> bool:
        """Fork the launcher into a session of its own; False, and a report, if it cannot run."""
        guard_pid = os.getpid()
        # Closed by a successful exec; a failed one writes its reason. After it the session exists.
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            self._exec(guard_pid, write_fd)
        os.close(write_fd)
        failure = os.read(read_fd, 4096)
        os.close(read_fd)
        if failure:
            os.waitpid(self.pid, 0)  # it ends by itself, after its last words
            _say(f"failed {failure.decode()}")
            return False
        _say(f"started {self.pid}")
        return True

    def _exec(self, guard_pid: int, report_fd: int) -> None:
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == guard_pid:  # else the guard died before the line above took effect
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(self.log_fd, 1)
                os.dup2(self.log_fd, 2)
                os.execvp(self.argv[0], self.argv)  # noqa: S606 (no shell is the point)
        except OSError as error:
            os.write(report_fd, f"cannot execute {self.argv[0]}: {error.strerror}".encode())
        finally:
            os._exit(EXEC_FAILED)

    def reap(self) -> None:
        """Collect every ended child, and report the launcher's end."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.launcher_exited = True
                _say(f"exited {os.waitstatus_to_exitcode(status)}")

    def note_memory(self) -> None:
        """Remember which shared memory is the engine's: once it is dead nobody can tell."""
        found: set[str] = set()
        for pid in descendants(os.getpid()):
            found |= shared_memory(pid)
        for path in found - self.memory:
            _say(f"memory {path}")  # the daemon's work, should the guard be killed
        self.memory |= found

    def watch_memory(self) -> None:
        """Look at the engine's shared memory, if there may be more of it than at the last look."""
        try:
            changed_ns = os.stat(SHARED_MEMORY).st_mtime_ns  # noqa: PTH116 (as above)
        except FileNotFoundError:
            return
        now = time.monotonic()
        if changed_ns != self.memory_changed_ns:
            self.memory_changed_ns = changed_ns
            self.memory_looks = MEMORY_LOOKS
        if self.memory_looks > 0 or now >= self.memory_look_at:
            self.memory_looks -= 1
            self.memory_look_at = now + MEMORY_STEP_S
            self.note_memory()

    def free_memory(self) -> None:
        """Remove the shared memory that the engine, now gone, has left behind."""
        for path in self.memory:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 (as above)

    def terminate(self) -> None:
        """Ask the launcher to end: it ends the others in order, where the whole group would not.

        (With SIGTERM for all at once, SGLang reports a crashed scheduler and kills itself.)
        """
        if not self.launcher_exited:  # else its pid may be another's by now
            os.kill(self.pid, signal.SIGTERM)

    def kill_all(self) -> None:
        """Kill group and descendants until none is left; then say so.

        There is no deadline: the guard is what stays with a process that the kernel cannot end yet,
        and the daemon has its own deadline for waiting.
        """
        step_s = KILL_STEP_S
        self.note_memory()
        while True:
            self.reap()
            left = descendants(os.getpid())
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(step_s)
            step_s = min(2 * step_s, STEP_S)
        self.free_memory()
        _say("gone")

    def watch(self, wakeup_fd: int) -> None:
        """Return once the launcher ended, the daemon is gone, or a stop's grace is over."""
        deadline = float("inf")
        pending = b""
        while not self.launcher_exited:
            self.watch_memory()
            timeout_s = min(STEP_S, deadline - time.monotonic())
            if timeout_s <= 0:
                return
            ready, _, _ = select.select([0, wakeup_fd], [], [], timeout_s)
            if wakeup_fd in ready:
                os.read(wakeup_fd, 4096)
            if 0 in ready:
                chunk = os.read(0, 4096)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self.note_memory()
                    self.terminate()
                    grace_s = float(line.removeprefix(b"stop "))
                    deadline = min(deadline, time.monotonic() + grace_s)
            self.reap()


def main(arguments: list[str]) -> None:
    """Guard one engine from its start until nothing of it is left."""
    for signum in DEFERRED:
        # Ctrl-C or a service manager reaches the guard too: the daemon decides, not they.
        signal.signal(signum, _ignore)
    # uvloop leaves its copies of our pipes open in us: an engine that inherited them would keep the
    # daemon from seeing our end.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    log_path, separator, *argv = arguments
    if separator != "--" or not argv:
        raise SystemExit("usage: guard.py LOGFILE -- ARGV...")
    # 0600: SGLang logs its arguments, the API key among them.
    try:
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _say(f"failed cannot write the log {log_path}: {error.strerror}")
        return
    os.dup2(log_fd, 2)  # a traceback of the guard itself
    wakeup_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore)
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")
    guard = Guard(argv, log_fd)
    try:
        if guard.start():
            guard.watch(wakeup_fd)
    finally:
        guard.kill_all()


if __name__ == "__main__":
    main(sys.argv[1:])
