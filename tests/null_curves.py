"""Simulated curves of one eval set: the records of points whose model does not change, or falls.

Questions differ in difficulty, responses are drawn anew at each point, and the numbers of a record
are made as evald makes them: error, interval, paired differences to the point before and to the
baseline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from evald.evals.stats.errors import mean_error, share_interval
from evald.evals.stats.paired import difference
from evald.point import Kind, Outcome
from evald.results.records import PointRecord

NAME = "eval/sim"


def curve(
    rng: random.Random,
    *,
    questions: int,
    samples: int,
    points: int,
    fall_at: int = 0,
    by: float = 0.0,
) -> Iterator[PointRecord]:
    """Give a baseline and ``points`` steps; from ``fall_at`` on every chance is ``by`` smaller."""
    chances = [rng.betavariate(1.0, 0.8) for _ in range(questions)]
    previous = baseline = None
    for step in range(points + 1):
        fallen = by if fall_at and step >= fall_at else 0.0
        means = [_share(rng, max(chance - fallen, 0.0), samples) for chance in chances]
        record = _record(step, means)
        if baseline is not None:
            record.metrics |= _compared("baseline", means, baseline, binary=samples == 1)
        if previous is not None:
            record.metrics |= _compared("prev", means, previous, binary=samples == 1)
        if step == 0:
            baseline = means
        else:
            previous = means
        yield record


def _share(rng: random.Random, chance: float, samples: int) -> float:
    return sum(rng.random() < chance for _ in range(samples)) / samples


def _record(step: int, means: Sequence[float]) -> PointRecord:
    clusters = list(range(len(means)))
    error = mean_error(means, clusters)
    low, high = share_interval(means, clusters, error)
    kind = Kind.STEP if step else Kind.BASELINE
    return PointRecord(
        run="sim",
        step=step,
        kind=kind,
        record_id=f"sim/{kind}/{step}/r0",
        outcome=Outcome.OK,
        metrics={
            NAME: math.fsum(means) / len(means),
            f"{NAME}/stderr": error,
            f"{NAME}/ci95_low": low,
            f"{NAME}/ci95_high": high,
        },
    )


def _compared(
    name: str, new: Sequence[float], old: Sequence[float], *, binary: bool
) -> dict[str, float]:
    found = difference(new, old, list(range(len(new))), binary=binary)
    if found is None:
        return {}
    key = f"{NAME}/delta_{name}"
    numbers = {
        key: found.delta,
        f"{key}_stderr": found.stderr,
        f"{key}_p": found.p,
        f"{key}_up": float(found.up),
        f"{key}_down": float(found.down),
    }
    return {name: number for name, number in numbers.items() if number is not None}
