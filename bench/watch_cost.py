"""Cost of watching: the daemon's share of a core, and what evaluation loses.

A real daemon with a fake engine. Idle, its CPU time is read from /proc in four phases: nobody
watches, /metrics is scraped each second, an event stream is open (what the page does), both. Under
load, points are measured by turns with nobody and with both, and ``throughput`` is the ratio of the
medians of samples for each second (1: nothing is lost).

Goal: watching costs below 1 % of a core, and a loaded daemon at most 5 % of its throughput. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from daemon_rig import Rig, ask, rig, until
from idle_cost import cpu_seconds

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

SCRAPE_S = 1.0
_POINT_S = 300.0


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 s for each phase, 2 pairs")
    args = parser.parse_args()
    phase_s, pairs = (5.0, 2) if args.quick else (40.0, 6)
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    try:
        python = write_fake_python(work / "python")
        with rig(work, python=python, questions=1500) as r:
            r.start()
            until(lambda: r.status()["engines"][0]["state"] == "ready", "the engine is ready", 60)
            write_snapshot(r.root / "step_0", seed=0)
            r.point(0, timeout_s=_POINT_S)
            time.sleep(5)
            idle = {
                "nobody": share(r, phase_s),
                "metrics": share(r, phase_s, metrics=True),
                "events": share(r, phase_s, events=True),
                "both": share(r, phase_s, metrics=True, events=True),
            }
            rates: dict[bool, list[float]] = {False: [], True: []}
            for pair in range(pairs):
                # (which of the two comes first changes: the machine's own drift cancels)
                for turn in range(2):
                    watched = (pair + turn) % 2 == 1
                    rates[watched].append(rate(r, 1 + 2 * pair + turn, watched=watched))
            page_bytes = len(ask(work / "evald.sock", "/metrics"))
    finally:
        shutil.rmtree(work)
    ratio = statistics.median(rates[True]) / statistics.median(rates[False])
    figures = {
        "name": "watch_cost",
        "cpu_percent": {name: round(100 * value, 2) for name, value in idle.items()},
        "watching_percent": round(100 * (idle["both"] - idle["nobody"]), 2),
        "samples_per_s": round(statistics.median(rates[False]), 1),
        "throughput": round(ratio, 3),
        "spread": round(max(rates[False]) / min(rates[False]), 3),
        "page_bytes": page_bytes,
    }
    print(json.dumps(figures))
    return 0


def share(r: Rig, phase_s: float, *, metrics: bool = False, events: bool = False) -> float:
    """Return the daemon's share of one core while it is idle."""
    with watching(r, metrics=metrics, events=events):
        time.sleep(1)
        daemon = r.daemon
        if daemon is None:
            raise SystemExit("there is no daemon")
        before, began = cpu_seconds(daemon.pid), time.perf_counter()
        time.sleep(phase_s)
        return (cpu_seconds(daemon.pid) - before) / (time.perf_counter() - began)


def rate(r: Rig, step: int, *, watched: bool) -> float:
    """Return samples for each second of one point's evaluation."""
    with watching(r, metrics=watched, events=watched):
        write_snapshot(r.root / f"step_{step}", seed=step)
        point = r.point(step, timeout_s=_POINT_S)
    return point.counts.n_scored / point.timings.evaluate_s


@contextmanager
def watching(r: Rig, *, metrics: bool, events: bool) -> Iterator[None]:
    """Scrape, or hold a stream open, in threads of this process."""
    path, stop = r.work / "evald.sock", threading.Event()
    threads = []
    stream = socket.socket(socket.AF_UNIX)
    if metrics:
        threads.append(threading.Thread(target=scrape, args=(path, stop)))
    if events:
        stream.connect(str(path))
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not stream.recv(1 << 16).startswith(b"HTTP/1.1 200 "):
            raise SystemExit("the daemon serves no event stream")
        threads.append(threading.Thread(target=drain, args=(stream,)))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        stream.close()


def scrape(path: Path, stop: threading.Event) -> None:
    """Do what Prometheus does."""
    while not stop.wait(SCRAPE_S):
        ask(path, "/metrics")


def drain(stream: socket.socket) -> None:
    """Read what comes."""
    while stream.recv(1 << 16):
        pass


if __name__ == "__main__":
    raise SystemExit(main())
