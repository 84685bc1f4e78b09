"""A worker's own process: ``python -m evald.evals.worker DAEMON_PID [math]``.

Frames on stdin and stdout: four bytes of length (big endian), then msgpack. First an empty Reply
says "ready"; then each Job is answered by one Reply. The process ends at EOF, and with its daemon.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from evald.evals.graders import GraderFailed, Rules, grade

HEADER_BYTES = 4

_PR_SET_PDEATHSIG = 1
#: sympy can ask for more than a machine has (9**9**9) long before a deadline passes.
_MEMORY_BYTES = 4 << 30


class GradeJob(msgspec.Struct, array_like=True, tag=True):
    """One response to grade; the result is a Grade."""

    rules: Rules
    response: str
    references: list[str]


#: everything that a worker can be asked to do; the result's type depends on it.
Job = GradeJob


class Reply(msgspec.Struct, array_like=True):
    """The packed result of a job, or why there is none; the first one, with neither, is "ready"."""

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    failure: str | None = None


def frame(message: Job | Reply) -> bytes:
    """Pack one message with its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def answer(job: Job) -> Reply:
    """Do one job; whatever it raises becomes the failure of this one."""
    try:
        result = grade(job.rules, job.response, job.references)
    except GraderFailed as failed:
        return Reply(failure=str(failed))
    # sympy and antlr raise anything at all, and none of it may cost another answer
    except Exception as error:  # noqa: BLE001 - see above
        return Reply(failure=f"{type(error).__name__}: {error}"[:500])
    return Reply(msgspec.Raw(msgspec.msgpack.encode(result)))


def main() -> None:
    """Serve until EOF."""
    daemon_pid, preload = int(sys.argv[1]), sys.argv[2:]
    _die_with(daemon_pid)
    # the daemon decides when this ends: a signal to the whole group must not cost grades
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # what a library prints must not land between frames
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    ready = Reply()
    if "math" in preload:
        try:
            import math_verify  # noqa: F401, PLC0415 - sympy takes a third of a second
        except ImportError as error:
            ready = Reply(failure=f"cannot import math_verify: {error}; install math-verify")
    _send(replies, ready)
    jobs = msgspec.msgpack.Decoder(Job)
    while (body := _receive(sys.stdin.buffer)) is not None:
        _send(replies, answer(jobs.decode(body)))


def _die_with(daemon_pid: int) -> None:
    """End when the daemon ends, also when it is killed while a grader computes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != daemon_pid:
        # it died before the line above
        sys.exit(1)


def _send(pipe: BinaryIO, reply: Reply) -> None:
    pipe.write(frame(reply))
    pipe.flush()


def _receive(pipe: BinaryIO) -> bytes | None:
    header = pipe.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    size = int.from_bytes(header, "big")
    body = pipe.read(size)
    return body if len(body) == size else None


if __name__ == "__main__":
    main()
