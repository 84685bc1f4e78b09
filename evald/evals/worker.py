"""A worker's own process: ``python -m evald.evals.worker PARENT_PID [math] [python=RULES]``.

Frames on stdin and stdout: four bytes of length (big endian), then msgpack. First an empty Reply
says "ready"; then each Order is answered by one Reply with its number. The process ends at EOF, and
with its parent (``worker_keeper``). A process that user's code forks off never answers.
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

from evald.engines.guard import PR_SET_PDEATHSIG
from evald.evals.graders import Grade, GraderFailed, Rules, Sample, grade, is_external, sample_texts
from evald.evals.graders.external import limit_memory
from evald.evals.graders.python import enter
from evald.evals.stats.set_metrics import StatsJob, set_metrics
from evald.text import encode_json, one_line

HEADER_BYTES = 4

_PYTHON = "python="
#: sympy can ask for more than a machine has (9**9**9) long before a deadline passes.
_MEMORY_BYTES = 4 << 30


class GradeJob(msgspec.Struct, array_like=True, tag=True):
    """One response to grade; the result is a Grade."""

    rules: Rules
    #: the Sample, as JSON: in rows there are numbers that msgpack does not know.
    sample: bytes

    @classmethod
    def of(cls, rules: Rules, sample: Sample) -> GradeJob:
        """Pack what the grader needs; raises GraderFailed."""
        return cls(rules, encode_json(sample if is_external(rules) else sample_texts(sample)))


#: everything that a worker can be asked to do; the result's type depends on it.
Job = GradeJob | StatsJob


class Order(msgspec.Struct, array_like=True):
    """A job, and the number that its reply must have."""

    number: int
    job: Job


class Reply(msgspec.Struct, array_like=True):
    """The packed result of a job, or why there is none; the first one, with neither, is "ready"."""

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    failure: str | None = None
    #: that of the order, from 1; 0: "ready".
    number: int = 0


def frame(message: Order | Reply) -> bytes:
    """Pack one message with its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def answer(job: Job, number: int = 0) -> Reply:
    """Do one job; whatever it raises becomes the failure of this one."""
    try:
        result = set_metrics(job) if isinstance(job, StatsJob) else _grade(job)
        return Reply(msgspec.Raw(msgspec.msgpack.encode(result)), number=number)
    except GraderFailed as failed:
        return Reply(failure=str(failed), number=number)
    # sympy and antlr raise anything at all, and none of it may cost another answer
    except Exception as error:  # noqa: BLE001 - see above
        failure = one_line(f"{type(error).__name__}: {error}"[:500])
        return Reply(failure=failure, number=number)


def _grade(job: GradeJob) -> Grade:
    return grade(job.rules, _samples.decode(job.sample))


def main() -> None:
    """Serve until EOF."""
    parent_pid, preload = int(sys.argv[1]), sys.argv[2:]
    die_with(parent_pid)
    # the daemon decides when this ends: a signal to the whole group must not cost grades
    for number in (signal.SIGINT, signal.SIGTERM):
        # (what is only ignored, programs would ignore that a grader starts)
        signal.signal(number, lambda *_: None)
    limit_memory(_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipes = _Pipes()
    pipes.send(_prepare(preload))
    orders = msgspec.msgpack.Decoder(Order)
    while (body := pipes.receive()) is not None:
        order = orders.decode(body)
        pipes.send(answer(order.job, order.number))


def preload_python(rules: Rules) -> str:
    """Word for a worker's command line: it will grade by these rules, and nothing else."""
    return _PYTHON + msgspec.json.encode(rules).decode()


def _prepare(preload: list[str]) -> Reply:
    """Import what the first job must not wait for."""
    own = [word.removeprefix(_PYTHON) for word in preload if word.startswith(_PYTHON)]
    try:
        if not own:
            logging.disable(logging.CRITICAL)
        for word in own:
            enter(msgspec.json.decode(word, type=Rules))
        if "math" in preload:
            import math_verify  # noqa: F401, PLC0415 - sympy takes a third of a second
    except ImportError as error:
        return Reply(failure=f"cannot import math_verify: {error}; install math-verify")
    except GraderFailed as failed:
        return Reply(failure=str(failed))
    return Reply()


def die_with(parent_pid: int) -> None:
    """End when the parent ends, also when it is killed while this process computes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # it died before the line above
        sys.exit(1)


class _Pipes:
    """Standard input and output, taken away from everything else in the process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # what a library prints must not land between frames, nor may a program that a grader starts
        # wait for what it will never read (neither copy is inherited by programs)
        self._orders: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._replies: BinaryIO = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def send(self, reply: Reply) -> None:
        """Answer; in a process that was forked off on the way here, end."""
        if os.getpid() != self._pid:
            # a grader has forked, and its child came back too: this answer is nobody's
            os._exit(0)
        self._replies.write(frame(reply))
        self._replies.flush()

    def receive(self) -> bytes | None:
        """Wait for one order; None at the end."""
        header = self._orders.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        size = int.from_bytes(header, "big")
        body = self._orders.read(size)
        return body if len(body) == size else None


_samples: msgspec.json.Decoder[Sample] = msgspec.json.Decoder(Sample)

if __name__ == "__main__":
    main()
