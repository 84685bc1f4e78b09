"""What must be true after a chaos run, whatever has hit it."""

from __future__ import annotations

import time
from collections import Counter

from evald.point import Kind, Outcome, SkipReason
from evald.results.records import Accepted, Alert, PointRecord, SetRecord

from .oracle import FakeOracle, Oracle, samples_of
from .plan import BUDGET_BYTES, DAMAGED
from .setting import QUESTIONS, SAMPLES
from .world import World

#: processes end within this after the daemon has.
GONE_S = 10.0


def check(world: World, oracle: Oracle | None = None) -> list[str]:
    """Return one sentence for each breach; ``oracle``: None for fake engines."""
    return [
        *world.problems,
        *_ledger(world),
        *_answers(world),
        *_scores(world, oracle or FakeOracle(world)),
        *_budget(world),
        *_leftovers(world),
    ]


def _ledger(world: World) -> list[str]:
    """See that ``seq`` has no gap, and that each point has one end, behind its acceptance."""
    records = world.records()
    faults = []
    numbers = [record.seq for record in records]
    if numbers != list(range(1, len(numbers) + 1)):
        faults.append(f"seq is not contiguous: {numbers}")
    ends = Counter(record.record_id for record in records if isinstance(record, PointRecord))
    faults += [f"{name} has {count} terminal records" for name, count in ends.items() if count > 1]
    keys = {(one.kind, one.step, one.revision) for one in world.points()}
    faults += [
        f"{record.record_id} has no terminal record"
        for record in records
        if isinstance(record, Accepted) and (record.kind, record.step, record.revision) not in keys
    ]
    return faults


def _answers(world: World) -> list[str]:
    """See that each step has an end, that the newest bytes have, and the damaged have no score."""
    faults = []
    by_step: dict[int, list[PointRecord]] = {}
    for point in world.points():
        by_step.setdefault(point.step, []).append(point)
    digests = {line["digest"] for line in world.told() if line.get("digest")}
    newest = {
        line["step"]: line for line in world.told() if line["state"] == "done" and "step" in line
    }
    for step, line in newest.items():
        points = by_step.get(step, [])
        if not points and step not in world.touched:
            faults.append(f"step {step} ({line['how']}) has no terminal record")
        elif points and line.get("digest") and step not in world.touched:
            last = max(points, key=lambda point: point.revision)
            if line["digest"] not in {point.digest for point in points} and not _no_digest(last):
                faults.append(f"step {step}: its newest bytes have no terminal record")
    for point in world.points():
        if point.reason == SkipReason.CRASHED:
            faults.append(f"{point.record_id} crashed: {point.detail}")
        scored = point.outcome is not Outcome.SKIPPED
        if scored and point.kind is Kind.STEP and point.digest not in digests:
            faults.append(f"{point.record_id} has a score of bytes that nobody dropped")
        elif scored and any(
            line["step"] == point.step and line["how"] in DAMAGED and line["digest"] == point.digest
            for line in world.told()
            if line.get("digest")
        ):
            faults.append(f"{point.record_id} has a score of a damaged snapshot")
    return faults


def _no_digest(point: PointRecord) -> bool:
    """Tell whether a point was skipped before its bytes were read."""
    return point.outcome is Outcome.SKIPPED and point.digest is None


def _scores(world: World, oracle: Oracle) -> list[str]:
    """See that counts add up, and that every score is what undisturbed engines would give."""
    dropped = {line["digest"] for line in world.told() if line.get("digest")}
    sets = [record for record in world.records() if isinstance(record, SetRecord)]
    n_total = QUESTIONS * sum(SAMPLES.values())
    faults = []
    for point in world.points():
        if point.outcome is Outcome.SKIPPED or point.digest not in dropped:
            continue
        counts = point.counts
        kinds = counts.n_scored + counts.n_error + counts.n_grader_error + counts.n_timeout
        if not counts.n_total == kinds == n_total:
            faults.append(f"{point.record_id}: {counts} is not the sum of {n_total} samples")
        key = (point.step, point.revision, point.kind)
        mine = {
            record.set: record.counts
            for record in sets
            if (record.step, record.revision, record.kind) == key
        }
        if set(mine) != set(SAMPLES) or sum(one.n_total for one in mine.values()) != n_total:
            faults.append(f"{point.record_id}: its sets are {mine}")
        for name in SAMPLES:
            faults += _set_scores(world, point, name, oracle)
    return faults


def _set_scores(world: World, point: PointRecord, name: str, oracle: Oracle) -> list[str]:
    samples = samples_of(world, point, name)
    right = 0.0
    faults = []
    for sample in samples:
        if sample.status != "scored":
            continue
        number = int(sample.question) - 1
        expected = oracle.expect(point.digest or "", name, number)
        right += expected[1]
        if not sample.response.endswith(expected[0]) or sample.score != expected[1]:
            faults.append(
                f"{point.record_id}/{name}: question {number} has {sample.response!r} and score "
                f"{sample.score}, without faults {expected}"
            )
    total = QUESTIONS * SAMPLES[name]
    told = point.metrics.get(f"eval/{name}")
    if told is None or abs(told - right / total) > 1e-9:
        faults.append(f"{point.record_id}: eval/{name} is {told}, its samples give {right / total}")
    if len(samples) > total:
        faults.append(f"{point.record_id}/{name}: {len(samples)} samples of {total}")
    return faults


def _budget(world: World) -> list[str]:
    """See that the SDK has kept to the byte budget; its last snapshot alone may go over it."""
    budget = BUDGET_BYTES if "max_bytes" in world.plan.staging else None
    largest = max(
        (one.size_bytes for one in world.records() if isinstance(one, Accepted)), default=0
    )
    if world.plan.sdk is None or budget is None or world.most_bytes <= budget + largest:
        return []
    return [f"snapshots took {world.most_bytes} bytes, the budget is {budget}"]


def _leftovers(world: World) -> list[str]:
    """See that no process, socket, hidden directory or ended snapshot is left."""
    faults = []
    give_up = time.monotonic() + GONE_S
    while (left := world.places.processes()) and time.monotonic() < give_up:
        time.sleep(0.05)
    faults += [f"process {pid} is left: {command}" for pid, command in left.items()]
    if (world.places.work / "evald.sock").exists():
        faults.append("the socket is left")
    root = world.places.root
    kept = sorted(path.name for path in root.glob("step_*") if (path / ".complete").exists())
    told = sum(
        isinstance(record, Alert) and record.name == "snapshot_not_deleted"
        for record in world.records()
    )
    keep = 0 if "keep = 0" in world.plan.staging else 2
    if len(kept) > keep + told:
        faults.append(f"{len(kept)} snapshots are left, keep is {keep}: {kept}")
    trash = root / ".evald" / "trash"
    if not told and trash.is_dir() and (lost := list(trash.iterdir())):
        faults.append(f"trash is left: {lost}")
    faults += [f"{word.name} was not consumed" for word in root.glob("*.skip")]
    return faults
