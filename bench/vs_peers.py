"""Time for each checkpoint, weight update included: evald against what users would run instead.

One SGLang server in CPU mode, one tiny model, the same short prompts in greedy decoding. By turns:
evald, warm, from the marker to the terminal record in the ledger; ``minimal_client`` after a plain
``/update_weights_from_disk``; the same with an httpx loop as RL frameworks have it; then, each once
or twice, sgl-eval and lm-eval as whole commands after the same update. evald's time has validation,
hash, pin with its proof, journals, grades and statistics in it; the others' have what they do.

``ratio``: evald's time / the minimal client's, median of pairs; goal: at most 1.15.
``best_peer_over_evald``: the fastest peer's time / that of evald's turns before and after it; goal:
at least 2.

The peers (``pip install 'evald[bench]'``) bring data set libraries that evald does not want beside
its own: make them an environment and name it with ``--peers``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon_rig import Rig, rig, until
from engine_server import Server, server_of
from eval_throughput import wait_for
from minimal_client import Ask, ask_all, asks_of, best_in_flight
from peer_commands import PeerFailed, Peers, httpx_loop

from evald.config import EvalSet
from evald.testing import write_snapshot

SET, MAX_TOKENS = "short", 8
CANDIDATES = (96, 128, 192)
_START_S = 300.0
_TABLE = """
[[eval]]
name = "{set}"
path = "{path}"
grader = "boxed_exact"
max_response_len = {max_tokens}
"""


class Race:
    """One server, asked by turns; each turn has a checkpoint of its own."""

    def __init__(self, r: Rig, server: Server, asks: list[Ask], in_flight: int) -> None:
        self._rig, self._server, self._asks = r, server, asks
        self._in_flight = in_flight
        self._step = 1
        self.seconds: dict[str, list[float]] = {}

    def evald(self, *, warm: bool = True) -> None:
        """Write the marker, and wait for the record."""
        step, self._step = self._step, self._step + 1
        directory = write_snapshot(self._rig.root / f"step_{step}", seed=step, marker=None)
        began = time.perf_counter()
        (directory / ".complete").touch()
        point = wait_for(self._rig.work / "results", step)
        seconds = time.perf_counter() - began
        if str(point.outcome) != "ok" or point.counts.n_scored != len(self._asks):
            raise SystemExit(f"step {step} ended {point.outcome}: {point.detail}")
        timings = point.timings
        print(
            f"        pin {timings.pin_s:.3f}, evaluate {timings.evaluate_s:.3f}", file=sys.stderr
        )
        if warm:
            self._note("evald", seconds)

    def minimal(self) -> None:
        """Update, ask all, hold nothing."""
        self._after_update(
            "minimal",
            lambda: asyncio.run(
                ask_all(self._server, self._asks, in_flight=self._in_flight, flush=False)
            ),
        )

    def httpx(self) -> None:
        """Update, then a loop over httpx."""
        self._after_update(
            "httpx", lambda: asyncio.run(httpx_loop(self._server, self._asks, self._in_flight))
        )

    def peer(self, name: str, command: Callable[[Server, str], None]) -> str:
        """Update, then run a whole command; what went wrong, in words."""
        try:
            self._after_update(name, lambda: command(self._server, self._model()))
        except PeerFailed as failed:
            return str(failed)
        return ""

    def _after_update(self, name: str, action: Callable[[], object]) -> None:
        self._step += 1
        # beside the root: nobody else measures it
        directory = self._rig.work / "updates" / f"step_{self._step}"
        write_snapshot(directory, seed=self._step)
        began = time.perf_counter()
        body = {"model_path": str(directory), "load_format": "auto", "weight_version": "bench"}
        answer = self._server.ask("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise SystemExit(f"the server did not load {directory}: {answer}")
        action()
        self._note(name, time.perf_counter() - began)

    def _model(self) -> str:
        """Name of the model as the server has it now: each update changes it."""
        model: str = self._server.ask("/v1/models")["data"][0]["id"]
        return model

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)
        print(f"{name:9}{seconds:8.3f} s", file=sys.stderr)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="venv with sgl-eval and lm_eval")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-runs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="300 questions, 3 rounds, 1 peer run")
    args = parser.parse_args()
    if args.quick:
        args.questions, args.rounds, args.peer_runs = 300, 3, 1
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    try:
        data, problems = write_questions(work, args.questions)
        table = _TABLE.format(set=SET, path=data, max_tokens=MAX_TOKENS)
        with rig(work, sets=False, tables=table, fleet="engines = 1") as r:
            r.start()
            until(lambda: r.status()["engines"][0]["state"] == "ready", "it is ready", _START_S)
            figures = race(r, work, data, problems, args)
    finally:
        shutil.rmtree(work)
    print(json.dumps(figures))
    return 0


def race(
    r: Rig, work: Path, data: Path, problems: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Take turns; the figures."""
    engine = r.status()["engines"][0]
    server = server_of(engine["pid"])
    eval_set = EvalSet(name=SET, path=str(data), grader="boxed_exact", max_response_len=MAX_TOKENS)
    asks = asks_of(eval_set, r.model)
    in_flight, _ = asyncio.run(best_in_flight(server, asks, CANDIDATES))
    peers = Peers(work, problems, args.peers, max_tokens=MAX_TOKENS, in_flight=in_flight)
    it = Race(r, server, asks, in_flight)
    it.evald(warm=False)
    for number in range(args.rounds):
        for turn in (it.minimal, it.evald)[:: 1 if number % 2 else -1]:
            turn()
    ours, theirs = it.seconds["evald"].copy(), it.seconds["minimal"].copy()
    pairs = [one / other for one, other in zip(ours, theirs, strict=True)]
    faults, ratios = beside_peers(it, peers, args.peer_runs)
    over = {name: statistics.median(each) for name, each in ratios.items()}
    best = min(over, key=lambda name: over[name])
    medians = {name: statistics.median(times) for name, times in it.seconds.items()}
    return {
        "name": "vs_peers",
        "ratio": round(statistics.median(pairs), 3),
        "best_peer_over_evald": round(over[best], 3),
        "best_peer": best,
        "over_evald": {name: round(ratio, 2) for name, ratio in over.items()},
        "seconds": {name: round(seconds, 3) for name, seconds in medians.items()},
        "runs": {name: len(times) for name, times in it.seconds.items()},
        "questions": len(asks),
        "in_flight": in_flight,
        "not_run": faults,
    }


def beside_peers(
    it: Race, peers: Peers, runs: int
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Run the peers, each between two turns of evald; why some did not, and time / evald's."""
    faults, ratios = peers.missing(), dict[str, list[float]]()
    commands = {"sgl-eval": peers.sgl_eval, "lm-eval": peers.lm_eval}
    it.evald()
    for _ in range(runs):
        for name in ("httpx", *commands):
            if name in faults:
                continue
            if name == "httpx":
                it.httpx()
            elif fault := it.peer(name, commands[name]):
                faults[name] = fault
                continue
            # the machine may have become slower, or faster, meanwhile
            it.evald()
            beside = statistics.mean(it.seconds["evald"][-2:])
            ratios.setdefault(name, []).append(it.seconds[name][-1] / beside)
    return faults, ratios


def write_questions(work: Path, count: int) -> tuple[Path, Path]:
    """Write the same questions twice: as evald reads them, and as sgl-eval and lm-eval do."""
    rng = random.Random(1)  # noqa: S311 - the same questions each time
    data, problems = work / "short.jsonl", work / "problems.jsonl"
    with data.open("w") as ours, problems.open("w") as theirs:
        for number in range(count):
            a, b = rng.randrange(100), rng.randrange(100)
            text = f"{a}+{b}={number}?"
            message = {"role": "user", "content": text}
            ours.write(json.dumps({"prompt": [message], "label": str(a + b)}) + "\n")
            row = {"id": number, "problem": text, "expected_answer": str(a + b)}
            theirs.write(json.dumps(row) + "\n")
    return data, problems


if __name__ == "__main__":
    raise SystemExit(main())
