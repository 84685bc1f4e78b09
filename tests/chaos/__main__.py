"""``python -m tests.chaos --runs N --seed S``: N runs of which each has a seed of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from .faults import FAULTS
from .invariants import check
from .oracle import ReferenceOracle
from .plan import make_plan
from .world import World


class Report(msgspec.Struct, kw_only=True):
    """How a run went."""

    seed: int
    breaches: list[str]
    outcomes: dict[str, int]
    hits: list[str]
    seconds: float


def run_one(
    seed: int,
    *,
    points: int | None = None,
    faults: list[str] | None = None,
    real: bool = False,
    keep_in: Path | None = None,
) -> Report:
    """Go through one run; ``keep_in``: where logs of a failed one are left."""
    started = time.monotonic()
    world = World(make_plan(seed, points=points, faults=faults, real=real), real=real)
    try:
        world.run()
        if real:
            oracle = ReferenceOracle(world)
            breaches = [*oracle.problems, *check(world, oracle)]
        else:
            breaches = check(world)
        outcomes = Counter(f"{one.outcome} {one.reason}".strip() for one in world.points())
        if breaches and keep_in is not None:
            target = keep_in / f"seed-{seed}"
            shutil.rmtree(target, ignore_errors=True)
            sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(world.places.work, target, ignore=sockets)
    finally:
        world.close()
    return Report(
        seed=seed,
        breaches=breaches,
        outcomes=dict(outcomes),
        hits=world.hits,
        seconds=time.monotonic() - started,
    )


@contextmanager
def workers(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool; SIGTERM and Ctrl-C let what runs tidy up, and begin nothing more."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> int:
    """Run them all; exit code 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--points", type=int, help="default: 20 to 50, by the seed")
    parser.add_argument("--jobs", type=int, help="at the same time; default: 2, with --real 1")
    parser.add_argument("--real", action="store_true", help="with real SGLang in CPU mode")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only these")
    parser.add_argument("--keep-in", type=Path, help="logs and ledgers of failed runs")
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    failed = 0
    jobs = args.jobs or (1 if args.real else 2)
    started = time.monotonic()
    with workers(jobs) as pool:
        seeds = range(args.seed, args.seed + args.runs)

        def one(seed: int) -> Report:
            return run_one(
                seed,
                points=args.points,
                faults=args.fault,
                real=args.real,
                keep_in=args.keep_in,
            )

        for report in pool.map(one, seeds):
            word = "FAILED" if report.breaches else "passed"
            counts = ", ".join(f"{count} {name}" for name, count in report.outcomes.items())
            print(f"seed {report.seed}: {word} in {report.seconds:.1f} s: {counts}", flush=True)
            for breach in report.breaches:
                print(f"  {breach}", flush=True)
            if report.breaches:
                print(f"  after {', '.join(report.hits)}", flush=True)
            failed += bool(report.breaches)
            outcomes.update(report.outcomes)
            hits.update(report.hits)
    print(f"points: {dict(outcomes.most_common())}")
    print(f"faults: {dict(hits.most_common())}")
    if os.geteuid() != 0:
        print("not run, as only root may mount: full_root, full_results")
    print(f"{time.monotonic() - started:.0f} s, {jobs} at a time")
    print(f"{args.runs - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
