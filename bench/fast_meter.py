"""Runs a daemon whose loop is looked at 200 times a second: ``fast_meter.py FILE ... run CONFIG``.

The daemon's own meter (``status/loop_lag.py``) looks four times a second, too rarely for a bench of
seconds. This one takes its place. At the end of the daemon it writes one JSON list to FILE: for
each look the time when it was due (monotonic, s), by how much it was late, and how much of that the
daemon was ready to run and had no processor.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from evald.cli import main
from evald.status.loop_lag import LoopLag

TICK_S = 0.005


def waited_s(pid: int | str) -> float:
    """Seconds for which a process's main thread was ready to run and did not."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


async def look(self: LoopLag) -> None:
    """Take the place of ``LoopLag.run``."""
    looks = []
    try:
        while True:
            self.pulse.beat()
            due_s, waited = time.monotonic() + TICK_S, waited_s("self")
            await asyncio.sleep(TICK_S)
            late_s = max(0.0, time.monotonic() - due_s)
            looks.append((due_s, late_s, min(late_s, waited_s("self") - waited)))
    finally:
        Path(sys.argv[1]).write_text(json.dumps(looks))  # noqa: ASYNC240 - the daemon is ending


if __name__ == "__main__":
    LoopLag.run = look  # type: ignore[method-assign]
    raise SystemExit(main(["run", sys.argv[-1]]))
