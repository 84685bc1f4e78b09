"""The daemon with faults: ``python -m chaos.daemon CONFIG [--at SPEC]... [--control DIR]``.

``DIR/clock`` holds an offset of the wall clock in seconds, ``DIR/disk`` a fault of the disk
(``disk.py``). ``--at``: see ``points.arm``. ``--quick``: engines come back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from .disk import Disk
from .points import arm

#: seconds between two lines of what the process holds.
_COUNT_S = 1.0


def _bend_clock(offset_file: Path) -> None:
    """Let the wall clock be wrong by what the file says; before anything of evald is imported."""
    real = time.time

    def bent() -> float:
        with contextlib.suppress(OSError, ValueError):
            return real() + float(offset_file.read_text())
        return real()

    time.time = bent


def _hurry() -> None:
    """Shorten what a test would only wait for."""
    from evald.engines import pin, readiness, supervision  # noqa: PLC0415 (the clock comes first)
    from evald.engines.state import RestartPolicy  # noqa: PLC0415

    RestartPolicy.FIRST_S = 0.05
    RestartPolicy.MAX_RESTARTS = 40
    for module in (readiness, supervision):
        vars(module)["DEATH_NOTICE_S"] = 0.2
    pin.CANARY_TIMEOUT_S = pin.ABORT_TIMEOUT_S = 3.0


def _count_into(path: Path) -> None:
    """Write each second what the process holds: one JSON line each."""
    page = os.sysconf("SC_PAGE_SIZE")
    from evald.daemon import Daemon  # noqa: PLC0415 (the clock comes first)

    run = Daemon.run

    async def counted(self: Daemon) -> None:
        counter = asyncio.create_task(count(), name="count")
        try:
            await run(self)
        finally:
            counter.cancel()

    async def count() -> None:
        while True:
            write(len(asyncio.all_tasks()))
            await asyncio.sleep(_COUNT_S)

    def write(tasks: int) -> None:
        line = {
            "time": time.monotonic(),
            "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * page,
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 (as it is)
            "threads": threading.active_count(),
            "tasks": tasks,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    Daemon.run = counted  # type: ignore[method-assign]  # (from outside, as all of it)


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--control", type=Path)
    parser.add_argument("--at", action="append", default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--count-into", type=Path)
    args = parser.parse_args()
    if args.control is not None:
        _bend_clock(args.control / "clock")

    from evald.config_load import load_config  # noqa: PLC0415
    from evald.errors import EXIT_CONFIG, ConfigError, EvaldError  # noqa: PLC0415
    from evald.serve import serve  # noqa: PLC0415

    config = load_config(args.config)
    if args.quick:
        _hurry()
    if args.count_into is not None:
        _count_into(args.count_into)
    for spec in args.at:
        arm(spec)
    if args.control is not None:
        Disk(args.control / "disk").install()
    try:
        return serve(
            config,
            exit_on_run_end=False,
            log_level="info",
            read=lambda: load_config(args.config),
        )
    except EvaldError as error:  # as the command does
        print(f"evald: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    raise SystemExit(main())
