"""What ``evald run`` does after the config has been read: logging, preflight, event loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable

import structlog
import uvloop

from evald.config import Config
from evald.daemon import Daemon
from evald.errors import EXIT_CONFIG, ConfigError, EvaldError
from evald.log import configure_logging
from evald.preflight import preflight
from evald.signals import outlive_hangups

log = structlog.get_logger(__name__)

#: engines in the hundreds, a connection for each request in flight.
_OPEN_FILES = 65_536
#: new objects before the garbage collector looks at them (that takes 2 ms), and such looks before
#: it also looks at older ones: more than the requests of a large fleet make when a point begins.
_YOUNG_OBJECTS, _YOUNG_LOOKS = 10_000, 100
#: glibc's <malloc.h>: what is freed at the end of the heap goes back from so many bytes on, and
#: what is larger than so many never lies in the heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 128 << 10


def serve(
    config: Config,
    *,
    exit_on_run_end: bool,
    log_level: str | None,
    read: Callable[[], Config],
) -> int:
    """Run the daemon; returns its exit code.

    ``log_level`` wins over the config's. ``read`` gives the config of now, for reloads.
    """
    configure_logging(log_level or config.log_level)
    outlive_hangups()
    _allow_many_files()
    checked = preflight(config, environ=os.environ, keep_data=True)
    for note in checked.notes:
        log.info("preflight", note=note)

    async def main() -> None:
        await Daemon(
            config,
            checked,
            exit_on_run_end=exit_on_run_end,
            read=read,
            set_log_level=lambda level: configure_logging(log_level or level),
        ).run()

    _collect_rarely()
    _give_memory_back()
    code = 0
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except* EvaldError as group:
        for error in _leaves(group):
            code = max(code, EXIT_CONFIG if isinstance(error, ConfigError) else 1)
            print(f"evald: {error}", file=sys.stderr)  # noqa: T201 (the last word to a person)
    return code


def _allow_many_files() -> None:
    """Raise the soft limit on open files: a session's default of 1024 is for interactive work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _collect_rarely() -> None:
    """Keep the search for cyclic garbage from holding the event loop up.

    Thousands of requests in flight are some 100,000 objects, and a full search took 200 ms, again
    and again. What was loaded until now stays anyway; what requests leave behind has no cycles.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_LOOKS, 10)
    gc.enable()


def _give_memory_back() -> None:
    """Have large buffers go back to the system when they are freed.

    glibc raises both thresholds with each large buffer that is freed: the next ones then lie in the
    heap between small ones, and what they leave behind was 20 MB after a million samples.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # other C libraries have none
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def _leaves(group: BaseExceptionGroup[EvaldError]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
