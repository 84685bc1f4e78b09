"""Marker to acceptance: how long a finished snapshot waits until evald has it in the ledger.

Starts a real daemon without engines, drops snapshots into a staging root on tmpfs while a writer
keeps writing the shards of another snapshot beside them, and compares the time of each marker with
the time at which the point's ``accepted`` record could be read.

Goal: p99 below 100 ms. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evald.results.follow import Follower
from evald.results.records import Accepted, decode
from evald.testing import write_base_model, write_snapshot

CONFIG = """
run = "bench"
[staging]
root = "{root}"
keep = 1000
[results]
dir = "{work}/results"
[fleet]
model = "{work}/base"
device = "cpu"
engines = 0
[[eval]]
name = "none"
path = "{work}/none.jsonl"
"""


def main() -> int:
    """Run the bench; the exit code is 1 when a snapshot was never accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 snapshots instead of 200")
    parser.add_argument("--snapshots", type=int, default=None)
    args = parser.parse_args()
    count = args.snapshots or (50 if args.quick else 200)
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    root = Path(tempfile.mkdtemp(prefix="evald-bench-", dir="/dev/shm"))
    try:
        latencies = measure(work, root, count)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(root)
    latencies.sort()
    figures = {
        "name": "marker_latency",
        "snapshots": count,
        "p50_ms": round(1e3 * statistics.median(latencies), 2),
        "p99_ms": round(1e3 * latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))], 2),
        "max_ms": round(1e3 * latencies[-1], 2),
    }
    print(json.dumps(figures))
    return 0 if len(latencies) == count else 1


def measure(work: Path, root: Path, count: int) -> list[float]:
    """Latencies in seconds, one for each accepted snapshot."""
    stop = threading.Event()
    writer = threading.Thread(target=write_shards, args=(root / "step_999999", stop))
    with running_daemon(work, root):
        writer.start()
        try:
            return drop_and_watch(root, work / "results" / "results.jsonl", count)
        finally:
            stop.set()
            writer.join()


@contextmanager
def running_daemon(work: Path, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon without engines that watches ``root``; it serves when the block begins."""
    write_base_model(work / "base")
    (work / "none.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    config = work / "config.toml"
    config.write_text(CONFIG.format(root=root, work=work))
    with (work / "evald.log").open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "evald", "run", str(config)], stdout=log, stderr=log
        )
    try:
        wait_ready(root, work / "evald.log")
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=60)


def wait_ready(root: Path, log: Path) -> None:
    """Wait until the daemon serves."""
    status = root / ".evald" / "status.json"
    for _ in range(300):
        if status.exists() and json.loads(status.read_bytes())["state"] == "serving":
            return
        time.sleep(0.1)
    raise SystemExit(f"the daemon did not come up:\n{log.read_text()}")


def write_shards(directory: Path, stop: threading.Event) -> None:
    """Keep a foreign snapshot in the making: 4 MiB at a time, shard after shard, never a marker."""
    directory.mkdir()
    block = os.urandom(4 << 20)
    while not stop.is_set():
        for shard in range(8):
            with (directory / f"model-{shard:05d}.safetensors").open("wb") as file:
                for _ in range(8):
                    if stop.wait(0.005):
                        return
                    file.write(block)


def drop_and_watch(root: Path, results: Path, count: int) -> list[float]:
    """Drop one snapshot after the other; poll the ledger for its ``accepted`` record."""
    follower = Follower(results)
    latencies = []
    for step in range(count):
        directory = root / f"step_{step}"
        write_snapshot(directory, seed=step, marker=None)
        time.sleep(0.02 + 0.0037 * (step % 17))  # out of step with every poll of the daemon
        dropped = time.perf_counter()
        (directory / ".complete").touch()
        while time.perf_counter() - dropped < 10:  # noqa: PLR2004 (seconds: far above any target)
            if any(is_accepted(line, step) for line in follower.read()):
                latencies.append(time.perf_counter() - dropped)
                break
            time.sleep(0.0005)
    return latencies


def is_accepted(line: bytes, step: int) -> bool:
    """Whether a ledger line is the ``accepted`` record of ``step``."""
    record = decode(line)
    return isinstance(record, Accepted) and record.step == step


if __name__ == "__main__":
    raise SystemExit(main())
