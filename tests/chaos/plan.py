"""What happens in one run: the trainer's actions and the faults, all drawn from one seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec

from .faults import FAULTS

RUN = "t"
#: most of a trainer's actions are snapshots as they should be.
ACTIONS = {
    "publish": 10,
    "plain": 5,
    "sharded": 2,
    "skip": 2,
    "reuse": 2,
    "truncated": 1,
    "bit_flip": 1,
    "storm": 1,
}
#: these are no snapshots that may ever have a score.
DAMAGED = frozenset({"truncated", "bit_flip"})
#: hidden in the weights; fake engines answer with a number below VARY that depends on it.
ANSWERS, VARY = 100, 4


#: in half of the runs, the trainer has plugged the dispatcher in.
Overflow = Literal["skip", "backpressure"]
SDKS: list[Overflow | None] = [None, None, "skip", "backpressure"]
#: about eight snapshots.
BUDGET_BYTES = 1_200_000
#: how much longer a run with real engines takes.
REAL_STRETCH = 8.0


class Action(msgspec.Struct, kw_only=True):
    """One step of the trainer."""

    step: int
    how: str
    seed: int
    answer: int
    #: before it, seconds.
    pause_s: float
    #: when a resumed trainer comes by again: the same bytes, or others.
    again: str


class Timed(msgspec.Struct, kw_only=True):
    """A fault, this long after the start."""

    at_s: float
    name: str


class Plan(msgspec.Struct, kw_only=True):
    """One run."""

    seed: int
    actions: list[Action]
    faults: list[Timed]
    #: every action is a snapshot that an EvalDispatcher publishes, with this for ``overflow``.
    sdk: Overflow | None = None
    #: tables of the config.
    engines: int
    staging: str
    dispatch: str
    results: str


def make_plan(
    seed: int,
    *,
    points: int | None = None,
    faults: list[str] | None = None,
    real: bool = False,
) -> Plan:
    """Draw a run; ``faults``: names from which the faults are drawn (None: all).

    ``real``: with one real engine, which takes its time, and without what only fake ones can do.
    """
    rng = random.Random(seed)  # noqa: S311 - a schedule, no secret
    count = points or (rng.randint(8, 12) if real else rng.randint(20, 50))
    names = [
        name
        for name, kind in FAULTS.items()
        if (faults is None or name in faults) and not (real and kind.fake_only)
    ]
    stretch = REAL_STRETCH if real else 1.0
    sdk = rng.choice(SDKS)
    actions = []
    for step in range(1, count + 1):
        how = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        actions.append(
            Action(
                step=step,
                how="publish" if sdk or step == count else how,
                seed=rng.randrange(1 << 30),
                answer=rng.randrange(ANSWERS),
                pause_s=stretch * rng.choice([0.0, 0.05, 0.1, 0.2, 0.4]),
                again=rng.choice(["same", "same", "other"]),
            )
        )
    length_s = stretch * (1.0 + 0.2 * count)
    weights = [FAULTS[name].weight for name in names]
    chosen = (
        rng.choices(names, weights, k=rng.randint(2, 3) if real else rng.randint(3, 8))
        if names
        else []
    )
    times = sorted(rng.uniform(0.3, length_s) for _ in chosen)
    return Plan(
        seed=seed,
        sdk=sdk,
        actions=actions,
        faults=[Timed(at_s=at, name=name) for at, name in zip(times, chosen, strict=True)],
        engines=1 if real else rng.choice([1, 2, 3]),
        staging=rng.choice(["keep = 0", "keep = 2", f"keep = 2\nmax_bytes = {BUDGET_BYTES}"]),
        dispatch="overflow = "
        + rng.choice([*['"backpressure"'] * 4, '"latest"', '"skip"'])
        + f"\nmax_in_flight = {rng.choice([1, 2, 3])}",
        results=rng.choice(["rotate_mb = 0.02", ""]),
    )


def steady_plan(points: int, *, pause_s: float = 0.0) -> Plan:
    """Plan snapshots alone, and no fault."""
    rng = random.Random(points)  # noqa: S311 - a schedule, no secret
    weights = [(rng.randrange(1 << 30), rng.randrange(ANSWERS)) for _ in range(points)]
    return replay_plan(weights, pause_s=pause_s)


def replay_plan(weights: list[tuple[int, int]], *, pause_s: float = 0.0) -> Plan:
    """Plan snapshots of these (seed, answer) alone, as steps from 1, and no fault."""
    return Plan(
        seed=len(weights),
        actions=[
            Action(
                step=step, how="publish", seed=seed, answer=answer, pause_s=pause_s, again="same"
            )
            for step, (seed, answer) in enumerate(weights, start=1)
        ],
        faults=[],
        engines=1,
        staging="keep = 2",
        dispatch="",
        results="rotate_mb = 0.02",
    )


def write_plan(path: Path, plan: Plan) -> Path:
    """Write it for the trainer's process."""
    path.write_bytes(msgspec.json.encode(plan))
    return path


def read_plan(path: Path) -> Plan:
    """Read it there."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)
