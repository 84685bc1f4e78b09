"""False alarms and power of the ``drop`` rule on simulated curves, with its default k.

A curve has a baseline and 100 points of one eval set whose model does not change; or falls by some
points of score at one step. ``false``: alarms for each 1,000 points of the unchanged curves;
``found``: share of falls with an alarm at that step or within 4 more.

Goal: at most 1 false alarm for each 1,000 points. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Literal

from evald.alerts.comparing import Comparing, Watched
from evald.config_alerts import AlertRule

# simulated curves are in no package
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from null_curves import NAME, curve

POINTS = 100
FALL_AT = 20
#: questions, samples of each, and a fall of the mean score.
SETS = [(30, 16, 0.10), (200, 1, 0.20), (500, 1, 0.12), (500, 4, 0.06)]
REFERENCES: list[Literal["previous", "best", "baseline"]] = ["previous", "best", "baseline"]


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", type=int, default=100, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--k", type=float, default=2.0)
    args = parser.parse_args()
    rows = []
    for questions, samples, by in SETS:
        rng = random.Random(args.seed)  # noqa: S311 - a simulation
        false: dict[str, int] = dict.fromkeys(REFERENCES, 0)
        found: dict[str, int] = dict.fromkeys(REFERENCES, 0)
        for _ in range(args.curves):
            alarms = alarms_of(rng, args.k, questions=questions, samples=samples, points=POINTS)
            for against, steps in alarms.items():
                false[against] += len(steps)
            alarms = alarms_of(
                rng,
                args.k,
                questions=questions,
                samples=samples,
                points=FALL_AT + 4,
                fall_at=FALL_AT,
                by=by,
            )
            for against, steps in alarms.items():
                found[against] += any(step >= FALL_AT for step in steps)
        n_points = args.curves * POINTS
        row = {
            "questions": questions,
            "samples": samples,
            "fall": by,
            "false": {name: round(1000 * number / n_points, 3) for name, number in false.items()},
            "found": {name: round(number / args.curves, 2) for name, number in found.items()},
        }
        print(json.dumps(row))
        rows.append(row)
    print(json.dumps({"name": "alert_noise", "k": args.k, "curves": args.curves, "sets": rows}))
    return 0


def alarms_of(
    rng: random.Random,
    k: float,
    *,
    questions: int,
    samples: int,
    points: int,
    fall_at: int = 0,
    by: float = 0.0,
) -> dict[str, list[int]]:
    """Return the steps at which each of the rules finds a drop on one curve."""
    watched = [Watched(metric=NAME, sign=-1, sets=["sim"])]
    rules: dict[str, Comparing] = {
        against: Comparing(AlertRule(name=against, kind="drop", against=against, k=k), watched)
        for against in REFERENCES
    }
    alarms: dict[str, list[int]] = {against: [] for against in rules}
    for record in curve(
        rng, questions=questions, samples=samples, points=points, fall_at=fall_at, by=by
    ):
        for against, rule in rules.items():
            if any(verdict.holds for verdict in rule.note(record)):
                alarms[against].append(record.step)
    return alarms


if __name__ == "__main__":
    raise SystemExit(main())
