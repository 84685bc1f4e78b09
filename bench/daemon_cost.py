"""What the daemon itself costs: processor, the loop's lag, memory, and its start.

Fake engines that cost next to nothing (``fake_farm.py``) in a process of their own; all figures are
of the daemon's own process, from /proc and from its /metrics. Workers that encode prompts or grade
at length are other processes, and apart.

- ``cpu_ms_per_sample``: user and system time of whole points (pin, requests, grades, journal,
  record) for one-sample questions with 1,000-token answers; also with short ones, with 8 samples a
  question, and by a grader that works elsewhere. Goal: at most 1.
- ``lag_p99_ms``: how late the event loop is with 64 engines that would take 2,000 requests a second
  (32 each, a second long; ``achieved_per_s`` of them came). Goal: below 20. ``lag_own_p99_ms`` is
  without the time for which the daemon was ready to run and the machine had no processor for it
  (``waited_share``).
- ``rss_ratio``: resident memory at the most until 1,000,000 samples (100,000 with ``--quick``), by
  that at the most until 1,000, all in points of 10,000. Goal: flat, which is at most 1.1.
- ``start_s``: from the start of the process to an armed watch, without engines; the median of five
  starts. Goal: below 0.5.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_rig import Rig, rig, until
from fake_farm import farm
from fast_meter import waited_s
from idle_cost import cpu_seconds
from large_set import memory_mb

from evald.results.records import PointRecord
from evald.testing import write_base_model, write_snapshot

ENGINES, IN_FLIGHT, LONG_S = 64, 32, 1.0
PROMPT_CHARS = 250
STARTS = 5
_POINT_S = 3600.0

_SET = """
[[eval]]
name = "q"
path = "{path}"
grader = "{grader}"
max_response_len = 2048
n_samples_per_eval_prompt = {samples}
"""
_ATTACHED = """
[attached]
model = "{{model}}"
urls = {urls}
max_requests = {most}
"""


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fourth to a tenth of the samples")
    parser.add_argument("--samples", type=int, default=None, help="for the memory: 1,000,000")
    parser.add_argument("--only", choices=["start", "cpu", "lag", "memory"], default=None)
    args = parser.parse_args()
    figures: dict[str, Any] = {"name": "daemon_cost", "cores": os.cpu_count()}
    phases: dict[str, Callable[[], dict[str, Any]]] = {
        "start": measure_start,
        "cpu": lambda: measure_cpu(500 if args.quick else 5000),
        "lag": lambda: measure_lag(10_000 if args.quick else 40_000),
        "memory": lambda: measure_memory(args.samples or (100_000 if args.quick else 1_000_000)),
    }
    for name, phase in phases.items():
        if args.only in (None, name):
            found = phase()
            print(name, json.dumps(found))
            figures |= found
    print(json.dumps(figures))
    return 0


# --- the start -----------------------------------------------------------------------------------


def measure_start() -> dict[str, Any]:
    """Start a daemon without engines, and wait for the line in its log.

    The first start is not counted: after an installation there is no bytecode.
    """
    walls, cpus = [], []
    environ = {key: word for key, word in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(1 + STARTS):
        with workplace() as work, rig(work, posture=_NO_ENGINES, questions=100) as r:
            began = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "evald", "run", str(r.config)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=work,
                env=environ,
            )
            r.daemon = process
            for line in process.stderr or ():
                if b'"event": "ready"' in line:
                    break
            walls.append(time.perf_counter() - began)
            cpus.append(cpu_seconds(process.pid))
            process.kill()
            process.wait()
    del walls[0], cpus[0]
    return {
        "start_s": round(statistics.median(walls), 3),
        "start_best_s": round(min(walls), 3),
        "start_cpu_s": round(statistics.median(cpus), 3),
    }


# --- the processor -------------------------------------------------------------------------------


def measure_cpu(questions: int) -> dict[str, Any]:
    """Measure whole points, the first one of a daemon apart: it also encodes."""
    cases: dict[str, dict[str, Any]] = {
        "cpu_ms_per_sample": {"tokens": 1000},
        "cpu_ms_short": {"tokens": 16},
        "cpu_ms_8_samples": {"tokens": 16, "samples": 8},
        "cpu_ms_worker_graded": {"tokens": 16, "grader": "boxed_number"},
    }
    return {name: round(cpu_of(questions, **case), 3) for name, case in cases.items()}


def cpu_of(questions: int, *, tokens: int, samples: int = 1, grader: str = "boxed_exact") -> float:
    """Milliseconds of the daemon's processor time for each sample; the median of three points."""
    with (
        workplace() as work,
        engines(work, engines=4, most=64, delay_s=0.05, tokens=tokens) as posture,
        daemon(work, posture, questions=questions, samples=samples, grader=grader) as r,
    ):
        found = []
        for step in range(4):
            before = cpu_seconds(pid_of(r))
            point = measured(r, step)
            found.append((cpu_seconds(pid_of(r)) - before) / point.counts.n_scored)
        return 1000 * statistics.median(found[1:])


# --- the lag -------------------------------------------------------------------------------------


def measure_lag(samples: int) -> dict[str, Any]:
    """Offer 2,000 requests a second, and look how late the loop is meanwhile."""
    with (
        workplace() as work,
        engines(work, engines=ENGINES, most=IN_FLIGHT, delay_s=LONG_S, tokens=100) as posture,
    ):
        looks = work / "looks.json"
        with daemon(work, posture, questions=samples, looks=looks) as r:
            measured(r, 0)  # encodes, and connects
            pid, began = pid_of(r), time.monotonic()
            cpu, waited = cpu_seconds(pid), waited_s(pid)
            point = measured(r, 1)
            took = time.monotonic() - began
            cpu, waited = cpu_seconds(pid) - cpu, waited_s(pid) - waited
            r.stop()
        late = [look for look in json.loads(looks.read_bytes()) if 0 <= look[0] - began <= took]
    return {
        "lag_p99_ms": percentile([late_s for _, late_s, _ in late], 99),
        "lag_own_p99_ms": percentile([late_s - waited_s for _, late_s, waited_s in late], 99),
        "lag_p50_ms": percentile([late_s for _, late_s, _ in late], 50),
        "waited_share": round(waited / took, 2),
        "offered_per_s": round(ENGINES * IN_FLIGHT / LONG_S),
        "achieved_per_s": round(point.counts.n_scored / point.timings.evaluate_s),
        "lag_cpu_ms_per_sample": round(1000 * cpu / point.counts.n_scored, 3),
    }


def percentile(seconds: list[float], percent: int) -> float:
    """Give a percentile in milliseconds."""
    return round(1000 * statistics.quantiles(seconds, n=100)[percent - 1], 1)


# --- the memory ----------------------------------------------------------------------------------


def measure_memory(samples: int) -> dict[str, Any]:
    """Measure points of 10,000 samples (1,250 questions, 8 each) until there are enough."""
    with (
        workplace() as work,
        engines(work, engines=4, most=64, delay_s=0.05, tokens=100) as posture,
        daemon(work, posture, questions=1250, samples=8) as r,
    ):
        pid = pid_of(r)
        write_snapshot(r.root / "step_0", seed=0, answer=7)
        until(lambda: samples_done(r) >= 1000, "1,000 samples", _POINT_S)  # noqa: PLR2004
        first = most = memory_mb(pid, "VmHWM")
        r.point(0, timeout_s=_POINT_S)
        done = 10_000
        while done < samples:
            done += measured(r, done // 10_000).counts.n_scored
            if most != (most := memory_mb(pid, "VmHWM")):
                print(f"  {done} samples: {most} MB at the most", flush=True)
        most = memory_mb(pid, "VmHWM")
    return {
        "rss_ratio": round(most / first, 3),
        "rss_mb_at_1000": first,
        "rss_mb": most,
        "samples": done,
    }


def samples_done(r: Rig) -> int:
    """Count the samples of running points that are done."""
    return sum(one["done"] for point in r.status()["running"] for one in point["sets"])


# --- the world -----------------------------------------------------------------------------------

_NO_ENGINES = """
[attached]
model = "{model}"
urls = ["http://127.0.0.1:9"]
"""


@contextmanager
def workplace() -> Iterator[Path]:
    """Give a directory that is gone afterwards."""
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def engines(work: Path, *, engines: int, most: int, delay_s: float, tokens: int) -> Iterator[str]:
    """Run fake engines; the table of the config that attaches to them."""
    model = write_base_model(work / "base", max_position_embeddings=32768)
    with farm(model, engines=engines, delay_s=delay_s, tokens=tokens) as urls:
        yield _ATTACHED.format(urls=json.dumps(urls), most=most)


@contextmanager
def daemon(
    work: Path,
    posture: str,
    *,
    questions: int,
    samples: int = 1,
    grader: str = "boxed_exact",
    looks: Path | None = None,
) -> Iterator[Rig]:
    """Run a daemon with one set, whose engines are all there; ``looks``: see ``fast_meter``."""
    path = work / "q.jsonl"
    with path.open("w") as file:
        for number in range(questions):
            prompt = f"{number}: {'word ' * 60}"[:PROMPT_CHARS]
            file.write(json.dumps({"prompt": prompt, "label": "7"}) + "\n")
    tables = _SET.format(path=path, grader=grader, samples=samples)
    with rig(work, model=work / "base", posture=posture, sets=False, tables=tables) as r:
        meter = Path(__file__).with_name("fast_meter.py")
        r.start(before=[sys.executable, str(meter), str(looks)] if looks else [])
        until(lambda: all(e["state"] != "starting" for e in r.status()["engines"]), "engines", 60)
        yield r


def measured(r: Rig, step: int) -> PointRecord:
    """Have one snapshot measured, and check that nothing was lost."""
    known = r.results.stat().st_size

    def has_ended() -> bool:
        with r.results.open("rb") as ledger:
            ledger.seek(known)
            return b'"type":"point"' in ledger.read()

    write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
    until(has_ended, f"step {step} has its record", _POINT_S)
    point = r.points()[-1]
    if point.outcome != "ok":
        raise SystemExit(f"the point did not end as it must: {point.outcome}: {point.detail}")
    return point


def pid_of(r: Rig) -> int:
    """Process id of the daemon."""
    if r.daemon is None:
        raise SystemExit("there is no daemon")
    return r.daemon.pid


if __name__ == "__main__":
    raise SystemExit(main())
