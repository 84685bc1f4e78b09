"""The ledger and samples of a whole training run, for those who look at curves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evald.evals.rows import Question
from evald.point import Kind, Outcome, Timings
from evald.results.records import Alert, AnyRecord, Counts, PointRecord, SetRecord
from evald.results.samples import SampleRecord
from evald.status.sample_pages import AskedQuestion

#: sets, and where their scores begin and end.
SETS = {"aime": (0.12, 0.46), "gpqa-diamond": (0.31, 0.44), "math500": (0.55, 0.86)}
N = 200
QUESTIONS = 60
#: what a page must never run.
HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'"
HOSTILE_QUESTION = 3


def scores(step: int, last: int, chance: random.Random) -> dict[str, float]:
    """One point of a run that learns."""
    learnt = 1 - math.exp(-3 * step / last)
    return {
        name: min(0.99, max(0.01, low + (high - low) * learnt + chance.gauss(0, 0.012)))
        for name, (low, high) in SETS.items()
    }


def metrics_of(name: str, score: float, before: float | None, base: float | None) -> dict[str, Any]:
    """The metrics of one set, as the statistics name them."""
    error = math.sqrt(score * (1 - score) / N)
    key = f"eval/{name}"
    found = {
        f"{key}-truncated_ratio": 0.08 * (1 - score),
        f"{key}-none_reward_ratio": 0.0,
        f"{key}/no_answer_ratio": 0.05 * (1 - score),
        key: score,  # (records do not begin with it)
        f"{key}/stderr": error,
        f"{key}/ci95_low": score - 1.96 * error,
        f"{key}/ci95_high": score + 1.96 * error,
        f"{key}/response_len/mean": 900 + 2400 * score,
        f"{key}/response_len/max": 8192.0,
    }
    for word, other in (("prev", before), ("baseline", base)):
        if other is not None:
            delta = f"{key}/delta_{word}"
            found |= {
                delta: score - other,
                f"{delta}_stderr": 0.7 * error,
                f"{delta}_n": float(N),
                f"{delta}_up": float(round(N * max(0.02, score - other))),
                f"{delta}_down": float(round(N * max(0.02, other - score))),
                f"{delta}_p": 0.03,
            }
    return found


def make_run(run: str, n_points: int, *, every: int = 20, seed: int = 1) -> Iterator[AnyRecord]:
    """Give the records of a run: baseline, points, a skip now and then, one partial, an alert."""
    chance = random.Random(seed)  # noqa: S311 - the same run each time
    last = every * n_points
    base = scores(0, last, chance)
    yield _point(run, 0, base, {}, {}, kind=Kind.BASELINE)
    before: dict[str, float] = base
    for number in range(1, n_points + 1):
        step = every * number
        if number % 9 == 5:
            yield PointRecord(
                run=run,
                step=step,
                record_id=f"{run}/step/{step}/r0",
                outcome=Outcome.SKIPPED,
                reason="busy" if number % 2 else "invalid_snapshot",
                detail="two points were in flight already",
                metrics={f"eval/skipped_{'busy' if number % 2 else 'invalid_snapshot'}": 1},
            )
            continue
        found = scores(step, last, chance)
        yield _point(run, step, found, before, base, partial=number % 11 == 7)
        before = found
    yield Alert(
        run=run,
        step=0,
        record_id=f"{run}/alert/disk/1",
        name="disk",
        detail="results: 4.1 GB are free, less than the 5 GB of the rule",
    )


def _point(
    run: str,
    step: int,
    found: dict[str, float],
    before: dict[str, float],
    base: dict[str, float],
    *,
    kind: Kind = Kind.STEP,
    partial: bool = False,
) -> PointRecord:
    metrics: dict[str, float] = {}
    for name, score in found.items():
        metrics |= metrics_of(name, score, before.get(name), base.get(name))
    metrics["eval/all"] = sum(found.values()) / len(found)
    metrics["eval/all/stderr"] = 0.012
    metrics |= {"eval/step": step, "eval/lag_steps": step // 20 % 3, "eval/duration_seconds": 71.5}
    return PointRecord(
        run=run,
        step=step,
        kind=kind,
        record_id=f"{run}/{kind.value}/{step}/r0",
        outcome=Outcome.PARTIAL if partial else Outcome.OK,
        detail="7 of 600 samples have no score: grader timed out" if partial else "",
        counts=Counts(n_total=600, n_scored=593 if partial else 600, n_truncated=21, n_no_answer=9),
        timings=Timings(
            validate_s=0.4, queued_s=6.2, prepare_s=1.1, pin_s=9.8, evaluate_s=54.0, total_s=71.5
        ),
        engines=["engine-0", "engine-1"],
        weight_versions=[f"{run}:{step}:6a0a4e6f:412838d0"],
        provenance={
            "sets": {name: {"config": "c", "data": "d", "grader": "boxed_math"} for name in found},
            "snapshot": "6a0a4e6fa8cae8839b658ec3b9543f60",
            "sglang": "0.5.23",
        },
        metrics=metrics,
        directory=f"/dev/shm/evald/step_{step}",
        digest="6a0a4e6fa8cae8839b658ec3b9543f60",
    )


def set_record(run: str, step: int, name: str, score: float) -> SetRecord:
    """One set of a point that goes on."""
    return SetRecord(
        run=run,
        step=step,
        record_id=f"{run}/step/{step}/r0/{name}",
        set=name,
        counts=Counts(n_total=N, n_scored=N),
        seconds=20.0,
        metrics=metrics_of(name, score, None, None),
    )


def samples(score: float, *, seed: int) -> bytes:
    """A journal: some wrong, some truncated, one with hostile text."""
    chance = random.Random(seed)  # noqa: S311 - the same run each time
    lines = []
    for number in range(QUESTIONS):
        right = chance.random() < score and number != HOSTILE_QUESTION
        truncated = not right and number % 4 == 0
        answer = 3 * number if right else 3 * number + 1
        thought = f"We add {number} three times. " * (1 + number % 5)
        lines.append(
            SampleRecord(
                question=str(number),
                sample=0,
                digest="6a0a",
                config="c",
                status="grader_error" if number == 17 else "scored",
                score=None if number == 17 else float(right),
                truncated=truncated,
                finish_reason="length" if truncated else "stop",
                response=HOSTILE if number == HOSTILE_QUESTION else f"{thought}\\boxed{{{answer}}}",
                n_tokens=20 + number,
                reference=str(3 * number),
                grader_reason=f"answer: {answer}",
                engine="engine-0",
                weight_version="r:1:6a0a:x",
                latency_s=1.5,
            )
        )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def find_question(set_name: str, question: str) -> AskedQuestion | None:
    """The eval set behind ``samples``."""
    if set_name not in SETS:
        return None
    prompt = [
        {"role": "system", "content": "Answer with \\boxed{}."},
        {"role": "user", "content": f"What is 3 * {question}? {HOSTILE}"},
    ]
    return AskedQuestion(Question(id=question, prompt=prompt, label="1"), "d")


def write_samples(work: Path, run: str, step: int, *, seed: int) -> None:
    """Lay down the samples of a point."""
    directory = work / "samples" / run / f"step_{step}.r0"
    directory.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        (directory / f"{name}.jsonl").write_bytes(samples(0.6, seed=seed))
