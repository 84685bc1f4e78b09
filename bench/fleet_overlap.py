"""Points per hour of a fleet: one snapshot at a time, rolling pins, and stragglers moved together.

A whole daemon with 8 fake engines of 64 slots each, that cost what real ones cost (a decode step
takes 8 ms x (1 + running / 64), a load 1 s), measures 10 snapshots that are all there from the
start: 30 questions x 16 samples with log-normal lengths (median 400, 99th percentile 20 times
that, at most 16,384 tokens), ``max_in_flight = 4``. All times of the engines are divided by
``--scale``, so that the daemon has so many times less time for its own work than on a real fleet;
the figures are in the engines' time, from the first pin on. Three arms: both switches of [dispatch]
off, only ``rolling``, and evald as shipped; ``simulated`` is what a scheduler would get for which
nothing takes time but the engines.

``ratio``: points per hour as shipped against both off; the goal is 2.0. Every sample must be of one
digest and equal in all arms, moved or not, else the exit code is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from daemon_rig import Rig, rig, until
from fleet_simulation import Arm, simulate
from idle_cost import cpu_seconds

from evald.engines.guard import descendants
from evald.point import PointKey
from evald.results.compressed import open_samples
from evald.results.records import PointRecord
from evald.results.samples import SampleRecord, sample_file
from evald.testing import Decode, write_base_model, write_fake_python, write_snapshot

ENGINES, SLOTS, IN_FLIGHT = 8, 64, 4
QUESTIONS, SAMPLES, CAP = 30, 16, 16_384
STEP_S, PIN_S = 0.008, 1.0
#: a fake engine's answer is below that, and a question's label is one of these numbers.
NUMBERS = 3
SWITCHES: dict[Arm, str] = {
    "serial": "rolling = false",
    "rolling": "consolidate = false",
    "consolidated": "",
}
SETS = f"""
[[eval]]
name = "aime"
path = "aime.jsonl"
grader = "boxed_exact"
n_samples_per_eval_prompt = {SAMPLES}
max_response_len = {CAP}
"""
#: limits of one arm, and of the engines' first start.
ARM_S, START_S = 900.0, 60.0

#: step, question, number.
SampleKey = tuple[int, str, int]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal in all arms, and how often it was moved."""

    score: float | None
    tokens: int
    response: bytes
    moves: int

    @property
    def result(self) -> tuple[float | None, int, bytes]:
        """Give what must be equal."""
        return self.score, self.tokens, self.response


Samples = dict[SampleKey, Sample]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One arm, in the engines' time."""

    wall_s: float
    points_per_h: float
    #: shares of all engines' time, and of all their slots'.
    busy: float
    slots: float
    #: cores that the daemon needed, and engines and graders together.
    daemon_cpu: float
    others_cpu: float
    #: samples, and how often in all.
    moved: int
    moves: int
    #: tokens that were generated for nothing, as a share of the others.
    done_twice: float
    #: of one point, median.
    pin_s: float
    evaluate_s: float


def main() -> int:
    """Run the bench; the exit code is 1 when samples are not what they must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 points, in half the time")
    parser.add_argument("--points", type=int, default=None)
    parser.add_argument("--scale", type=float, default=None, help="20; with --quick 40")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="max_in_flight")
    parser.add_argument("--arm", action="append", choices=list(SWITCHES), help="only this one")
    args = parser.parse_args()
    points = args.points or (6 if args.quick else 10)
    scale = args.scale or (40.0 if args.quick else 20.0)
    runs: dict[Arm, Run] = {}
    samples: dict[Arm, Samples] = {}
    for arm in args.arm or SWITCHES:
        work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
        try:
            runs[arm], samples[arm] = run_arm(work, arm, points, scale, args.in_flight)
        finally:
            shutil.rmtree(work)
        print(json.dumps({"arm": arm, **msgspec.to_builtins(runs[arm])}), flush=True)
    results = [{key: one.result for key, one in arm.items()} for arm in samples.values()]
    if any(other != results[0] for other in results):
        raise SystemExit("the samples differ between the arms")
    lengths: dict[int, list[int]] = {step: [] for step in steps(points)}
    for (step, _, _), (_, tokens, _) in results[0].items():
        lengths[step].append(tokens)
    simulated = {
        arm: simulate(
            list(lengths.values()),
            arm,
            decode=Decode(step_s=STEP_S, slots=SLOTS),
            engines=ENGINES,
            pin_s=PIN_S,
            in_flight=args.in_flight,
        ).wall_s
        for arm in runs
    }
    base = next(iter(runs))
    figures = {
        "name": "fleet_overlap",
        "scale": scale,
        "load_average": round(os.getloadavg()[0], 1),
        "points": points,
        "in_flight": args.in_flight,
        "simulated": {arm: round(simulated[base] / wall_s, 2) for arm, wall_s in simulated.items()},
        "over_simulated": {arm: round(runs[arm].wall_s / simulated[arm], 2) for arm in runs},
        "arms": msgspec.to_builtins(runs),
        "ratios": {arm: round(runs[base].wall_s / run.wall_s, 2) for arm, run in runs.items()},
        "ratio": round(runs[base].wall_s / list(runs.values())[-1].wall_s, 2),
    }
    print(json.dumps(figures))
    return 0


def steps(points: int) -> range:
    """Give the steps of the points."""
    return range(1, points + 1)


def run_arm(work: Path, arm: Arm, points: int, scale: float, in_flight: int) -> tuple[Run, Samples]:
    """Measure all points with a fresh daemon."""
    usage_dir = work / "usage"
    usage_dir.mkdir()
    python = write_fake_python(
        work / "python",
        vary=NUMBERS,
        decode=Decode(step_s=STEP_S / scale, slots=SLOTS),
        load_s=PIN_S / scale,
        usage_dir=usage_dir,
    )
    rows = [{"prompt": f"Problem {n}: how many?", "label": "1"} for n in range(QUESTIONS)]
    (work / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with rig(
        work,
        python=python,
        model=write_base_model(work / "model", max_position_embeddings=2 * CAP),
        fleet=f"engines = {ENGINES}",
        dispatch=f"max_in_flight = {in_flight}\n{SWITCHES[arm]}",
        tables=SETS,
        sets=False,
    ) as r:
        daemon = r.start()
        until(lambda: are_ready(r), "the engines are ready", START_S)
        for step in steps(points):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=step, marker=None)
        before = cpu_of(daemon.pid)
        for step in steps(points):
            (r.root / f"step_{step}" / ".complete").touch()
        records = wait_for(r, points)
        after = cpu_of(daemon.pid)
        if (code := r.stop(60)) != 0:
            raise SystemExit(f"{r.log()[-5000:]}the daemon ended with {code}")
        samples = dict(read_samples(work, records))
    usages = [json.loads(path.read_bytes()) for path in usage_dir.iterdir()]
    if len(usages) != ENGINES or any(usage["foreign"] for usage in usages):
        raise SystemExit(f"an engine died, or went on with what other weights began: {usages}")
    wall_s = max(one.time for one in records) - min(map(began, records))
    engines_s = ENGINES * wall_s
    useful = sum(one.tokens for one in samples.values())
    run = Run(
        wall_s=round(wall_s * scale, 1),
        points_per_h=round(3600 * points / wall_s / scale, 2),
        busy=round(sum(usage["busy_s"] for usage in usages) / engines_s, 3),
        slots=round(sum(usage["slot_s"] for usage in usages) / engines_s / SLOTS, 3),
        daemon_cpu=round((after[0] - before[0]) / wall_s, 3),
        others_cpu=round((after[1] - before[1]) / wall_s, 3),
        moved=sum(one.moves > 0 for one in samples.values()),
        moves=sum(one.moves for one in samples.values()),
        done_twice=round(sum(usage["tokens"] for usage in usages) / useful - 1, 4),
        pin_s=median_s(records, "pin_s", scale),
        evaluate_s=median_s(records, "evaluate_s", scale),
    )
    return run, samples


def are_ready(r: Rig) -> bool:
    """Whether all engines are."""
    return [one["state"] for one in r.status().get("engines", [])] == ["ready"] * ENGINES


def wait_for(r: Rig, points: int) -> list[PointRecord]:
    """Wait until all points have ended; a look costs little beside what is measured."""
    deadline = time.monotonic() + ARM_S
    while len(records := r.points()) < points:
        if time.monotonic() > deadline or r.daemon is None or r.daemon.poll() is not None:
            raise SystemExit(f"{r.log()[-5000:]}{len(records)} of {points} points ended")
        time.sleep(0.05)
    for record in records:
        counts = record.counts
        if record.outcome != "ok" or counts.n_scored != QUESTIONS * SAMPLES:
            raise SystemExit(f"a point did not end as it must: {record}")
    return records


def began(record: PointRecord) -> float:
    """Tell when the point had its turn."""
    return record.time - record.timings.evaluate_s - record.timings.pin_s


def cpu_of(daemon: int) -> tuple[float, float]:
    """Seconds of the daemon, and of all processes below it: engines, graders."""
    below = 0.0
    for pid in descendants(daemon):
        with suppress(FileNotFoundError, ProcessLookupError):
            below += cpu_seconds(pid)
    return cpu_seconds(daemon), below


def read_samples(work: Path, records: list[PointRecord]) -> Iterator[tuple[SampleKey, Sample]]:
    """Read the journals of all points; each sample must be of its point's weights alone."""
    decoder = msgspec.json.Decoder(SampleRecord)
    for record in records:
        key = PointKey(record.run, record.step, record.revision, record.kind)
        version = f"{record.run}:{record.step}:{(record.digest or '')[:8]}:"
        with open_samples(sample_file(work / "results", key, "aime")) as file:
            for line in file:
                one = decoder.decode(line)
                versions = [one.weight_version, *(piece.weight_version for piece in one.pieces)]
                if not all(name.startswith(version) for name in versions):
                    raise SystemExit(f"a sample of {key} is not of its weights: {versions}")
                yield (
                    (record.step, one.question, one.sample),
                    Sample(
                        score=one.score,
                        tokens=one.n_tokens,
                        response=hashlib.sha256(one.response.encode()).digest(),
                        moves=max(len(one.pieces) - 1, 0),
                    ),
                )


def median_s(records: list[PointRecord], stage: str, scale: float) -> float:
    """Give the median time of a stage, in the engines' time."""
    times_s: list[float] = [getattr(record.timings, stage) for record in records]
    return round(statistics.median(times_s) * scale, 2)


if __name__ == "__main__":
    raise SystemExit(main())
