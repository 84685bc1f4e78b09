"""Between the daemon and a worker: once either is gone, nothing that the worker started is left.

``python -m evald.evals.worker_keeper [WORD ...]`` starts ``evald.evals.worker`` with the same words
and its own standard input and output. User's code runs in some workers and starts programs; killing
the worker alone would leave those behind. This process is the parent of every orphan, and ends with
the worker, when the daemon closes its end of standard input, or at SIGUSR1 (at once).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

from evald.engines.guard import PR_SET_CHILD_SUBREAPER, descendants

#: how long a worker without work may take to see that the daemon has hung up.
_GRACE_S = 1.0
#: between two rounds of killing, and for how long there are any.
_KILL_STEP_S = 0.005
_KILL_TIMEOUT_S = 5.0


class _Killed(Exception):
    """SIGUSR1: the worker is not to be waited for."""


def main() -> None:
    """Start, keep, clean up."""
    # the daemon decides when this ends: a signal to the whole group must not cost grades
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # -P: a module in the current directory must not stand in for a library
    words = ("-P", "-m", "evald.evals.worker", str(os.getpid()), *sys.argv[1:])
    try:
        signal.signal(signal.SIGUSR1, _kill)
        worker = os.posix_spawn(sys.executable, [sys.executable, *words], os.environ)
        # the daemon must see the end of the worker's answers
        os.close(1)
        _wait(worker)
    except _Killed:
        pass
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        kill_descendants()


def _kill(_signum: int, _frame: object) -> None:
    raise _Killed


def _wait(worker: int) -> None:
    """Return when the worker has ended, or has had its time after the daemon hung up."""
    ended = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLRDHUP)
    if ended not in dict(poll.poll()):
        poll.unregister(0)
        poll.poll(_GRACE_S * 1000)


def kill_descendants() -> None:
    """Kill and reap all that is below this process, as far as it has adopted its orphans."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_STEP_S)


if __name__ == "__main__":
    main()
