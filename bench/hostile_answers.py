"""Thirty hostile answers in one eval set, between good ones: wall time, lag of the loop, counts.

The real evaluator on the daemon's kind of loop, with engines that answer what they are told; once
for each grader. The lag is what a ticker of 5 ms was late; ``step`` is the most CPU time that the
loop's thread took between two of its ticks, which other processes on the machine do not change.

Goal: every good answer right, and no step above 50 ms. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tokenizers import Tokenizer, models

from evald.config import EvalSet
from evald.evals.worker_pool import WorkerPool
from evald.testing import hostile_answers

# the evaluator in front of engines that are made up is in no package
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from evaluator_world import FakePosture, World

#: by grader: what is right, and how a good response says it.
GRADERS = {
    "math": ("41", "so it is $41$"),
    "boxed_math": ("41", "so it is \\boxed{41}"),
    "regex": ("41", "it is 41"),
    "number": ("41", "it is 41."),
    "choice": ("D", "Answer: D"),
    "exact": ("41", "41"),
}
#: a pattern that explodes on letters with something else behind them.
BOMB = r"^(\w+\s?)*$|\d+"
GOOD = 10
TICK_S = 0.005


class Lag:
    """A ticker beside the work, from the first response on."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self.step_s = 0.0
        self.begun = asyncio.Event()

    async def tick(self) -> None:
        """Measure until cancelled."""
        await self.begun.wait()
        while True:
            due, used = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.late_s = max(self.late_s, time.perf_counter() - due)
            self.step_s = max(self.step_s, time.thread_time() - used)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=1.0, help="s for one answer's grading")
    parser.add_argument("--graders", nargs="+", default=list(GRADERS), choices=list(GRADERS))
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    sets: dict[str, Any] = {}
    try:
        model = write_model(work)
        for grader in args.graders:
            (work / grader).mkdir()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                sets[grader] = runner.run(measure(work / grader, model, grader, args.timeout))
            print(grader, json.dumps(sets[grader]))
    finally:
        shutil.rmtree(work)
    figures = {
        "name": "hostile_answers",
        "timeout_s": args.timeout,
        "cores": os.cpu_count(),
        "lag_ms": max(one["lag_ms"] for one in sets.values()),
        "step_ms": max(one["step_ms"] for one in sets.values()),
        "sets": sets,
    }
    print(json.dumps(figures))
    return 0


async def measure(work: Path, model: Path, grader: str, timeout_s: float) -> dict[str, Any]:
    """Evaluate one set; figures for the last line."""
    label, good = GRADERS[grader]
    answers = dict(zip(map(str, range(100)), hostile_answers().values(), strict=False))
    n_hostile = len(answers)
    answers |= {f"g{number}": good for number in range(GOOD)}
    # hostile and good ones by turns
    names = sorted(answers, key=lambda name: int(name.strip("g")))
    rows = "".join(json.dumps({"prompt": name, "label": label}) + "\n" for name in names)
    (work / "rows.jsonl").write_text(rows)
    fields = {"name": "hostile", "path": str(work / "rows.jsonl"), "grader": grader}
    settings = {"regex": BOMB, "grader_timeout_s": timeout_s, "max_response_len": 16}
    world = World(work, model)
    world.sets = [msgspec.convert(fields | settings, EvalSet)]
    world.workers = WorkerPool(preload=("math",) if grader.endswith("math") else ())
    lag = Lag()
    ticker = asyncio.create_task(lag.tick(), name="ticker")

    def reply(name: str) -> str:
        lag.begun.set()
        return answers[name]

    began = time.perf_counter()
    posture = FakePosture(reply, capacity=8)
    posture.token_chars = 4
    result = await world.evaluate(posture)
    took_s = time.perf_counter() - began
    ticker.cancel()
    counts = result.counts
    return {
        "hostile": n_hostile,
        "good": GOOD,
        "right": round(result.metrics["eval/hostile"] * counts.n_total),
        "seconds": round(took_s, 2),
        "lag_ms": round(1000 * lag.late_s, 1),
        "step_ms": round(1000 * lag.step_s, 1),
        "counts": msgspec.to_builtins(counts),
    }


def write_model(work: Path) -> Path:
    """Tokenizer and limits of a model whose tokens are single characters."""
    directory = work / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 94, "max_position_embeddings": 64}')
    vocab = {chr(33 + number): number for number in range(94)}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(directory / "tokenizer.json"))
    return directory


if __name__ == "__main__":
    raise SystemExit(main())
