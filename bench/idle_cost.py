"""Cost of an idle daemon without engines: resident memory, and its share of one core.

Starts a real daemon, lets it settle, and reads its CPU time over an interval from /proc.

Goal: below 100 MB, and below 1 % of a core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from marker_latency import running_daemon


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 s instead of 60 s")
    args = parser.parse_args()
    interval_s = 10.0 if args.quick else 60.0
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    root = Path(tempfile.mkdtemp(prefix="evald-bench-", dir="/dev/shm"))
    try:
        with running_daemon(work, root) as daemon:
            time.sleep(3)
            before, began = cpu_seconds(daemon.pid), time.perf_counter()
            time.sleep(interval_s)
            used, took = cpu_seconds(daemon.pid) - before, time.perf_counter() - began
            rss_bytes = resident_bytes(daemon.pid)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(root)
    figures = {
        "name": "idle_cost",
        "seconds": round(took, 1),
        "rss_mb": round(rss_bytes / 1e6, 1),
        "cpu_percent": round(100 * used / took, 2),
    }
    print(json.dumps(figures))
    return 0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    raise SystemExit(main())
