"""One run of a program in a worker process: bytes in, bytes out, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import subprocess
from collections.abc import Iterator

from evald.engines.guard import PR_SET_CHILD_SUBREAPER
from evald.engines.process_log import closing_words
from evald.evals.graders.contract import GraderFailed
from evald.evals.worker_keeper import kill_descendants

#: most that is read from standard output, and how much of standard error is kept.
MAX_OUTPUT_BYTES = 1 << 20
_KEPT_BYTES = 8192
_CHUNK_BYTES = 1 << 16
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def run(argv: list[str], given: bytes, *, cwd: str, max_memory_bytes: int | None = None) -> bytes:
    """Run ``argv`` and return what it wrote. Raises GraderFailed for all that is not exit code 0.

    Without a deadline: whoever calls this is killed, and the program with it.
    """
    _adopt_orphans()
    try:
        with _memory(max_memory_bytes):
            process = subprocess.Popen(  # noqa: S603 - the user's own command line
                argv,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
    except (OSError, ValueError) as error:
        raise GraderFailed(f"cannot start the grader {argv[0]}: {error}") from error
    try:
        output, errors = _talk(process, given)
        process.kill()  # (nothing, where it has ended)
        code = process.wait()
    finally:
        kill_descendants()
    words = closing_words(errors.decode(errors="replace"))
    if len(output) > MAX_OUTPUT_BYTES:
        raise GraderFailed(f"the grader {argv[0]} wrote more than {MAX_OUTPUT_BYTES} bytes")
    if code:
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise GraderFailed(f"the grader {argv[0]} {ending}; it said: {words or 'nothing'}")
    return output


def _talk(process: subprocess.Popen[bytes], given: bytes) -> tuple[bytes, bytes]:
    """Feed and read until the program has ended, whoever else still holds its pipes.

    Returns what it wrote on standard output, and the end of standard error.
    """
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise ValueError("the program has no pipes")
    output, errors, rest = bytearray(), bytearray(), memoryview(given)
    into = {process.stdout.fileno(): output, process.stderr.fileno(): errors}
    stdin = process.stdin.fileno()
    ended = os.pidfd_open(process.pid)
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        try:
            for number in (stdin, *into):
                os.set_blocking(number, False)
                selector.register(number, _WRITE if number == stdin else _READ)
            selector.register(ended, _READ)
            while len(output) <= MAX_OUTPUT_BYTES:
                ready = {key.fd for key, _ in selector.select()}
                if stdin in ready:
                    rest = rest[_give(stdin, rest) :]
                    if not rest:
                        selector.unregister(stdin)
                        process.stdin.close()
                for number in ready & into.keys():
                    # once it has ended, all that is in the pipe (they hold 64 KiB) is there
                    more = _take(number, into[number])
                    while more and ended in ready and len(into[number]) <= MAX_OUTPUT_BYTES:
                        more = _take(number, into[number])
                    if more is None:
                        selector.unregister(number)
                del errors[:-_KEPT_BYTES]
                if ended in ready:
                    break
        finally:
            os.close(ended)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    return bytes(output), bytes(errors)


def _give(number: int, rest: memoryview) -> int:
    """Write a piece; all of it where nobody reads."""
    try:
        return os.write(number, rest[:_CHUNK_BYTES])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(rest)


def _take(number: int, into: bytearray) -> int | None:
    """Read a piece; 0: there is nothing now, None: there never will be."""
    try:
        piece = os.read(number, _CHUNK_BYTES)
    except BlockingIOError:
        return 0
    into += piece
    return len(piece) or None


@contextlib.contextmanager
def _memory(max_bytes: int | None) -> Iterator[None]:
    """Give what is started meanwhile this limit, and not that of this process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes or before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _adopt_orphans() -> None:
    """Become the parent of whatever the program leaves behind, so that it can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
