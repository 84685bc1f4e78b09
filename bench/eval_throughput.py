"""Evaluation at the engine's own speed: evald's points against the least that can ask the server.

The same requests (token ids, sampling) go to the same server by turns: as a point of a warm daemon,
and from ``minimal_client``, at the number in flight that was its fastest. evald's time is the
``evaluate`` stage of the point's terminal record: first request to last record, grades and
statistics included; what stands before it is for ``pin.py``. Both begin with an empty prefix cache.

``ratio``: evald's tokens/s / the client's in the turn beside it, median over the rounds (on a GPU,
where a client with more in flight takes every other turn: median / median of the best). Goal: at
least 0.95 on fake engines that decode (``--quick``) and on SGLang in CPU mode (``--engine cpu``),
0.97 on a GPU: ``--engine gpu --model DIR`` starts a daemon; with ``--config FILE`` the daemon that
runs with that config gets the load as one more eval set, by a reload, and is left as it was. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from daemon_rig import ask, rig, until
from engine_server import Server, server_of
from idle_cost import cpu_seconds
from minimal_client import Ask, Took, ask_all, asks_of, best_in_flight

from evald.config import Config, EvalSet
from evald.config_load import load_config
from evald.results.follow import read_records
from evald.results.records import PointRecord
from evald.testing import write_snapshot
from evald.testing.decode_model import Decode
from evald.testing.fake_launcher import write_fake_python

SET = "throughput"
_START_S, _POINT_S, _POLL_S = 600.0, 300.0, 0.005
#: a fake engine: 64 slots, 4 to 8 ms a step, responses of 40 tokens, one in a hundred of 150.
_DECODE = Decode(step_s=0.004, slots=64, median_tokens=40, p99_tokens=150)
#: SGLang's arguments on a GPU whose environment may have no more than attention kernels.
_GPU_ARGUMENTS = """
attention-backend = "fa3"
sampling-backend = "pytorch"
grammar-backend = "none"
context-length = 4096
mem-fraction-static = 0.7
"""


class Load(NamedTuple):
    """What is asked in one turn, and how often."""

    questions: int
    prompt_chars: int
    max_tokens: int
    temperature: float
    #: numbers in flight that the client tries: before the rounds, or (on a GPU, where time is
    #: dear) one in each round.
    candidates: tuple[int, ...]
    rounds: int


#: On two cores a client's own CPU is taken from the engine, and the shorter the answers, the more:
#: ``--engine cpu --tokens 16 --questions 600`` is harder on evald than the 64 tokens here.
LOADS = {
    "fake": Load(600, 16, 256, 0.0, (64, 68, 96), 3),
    "cpu": Load(400, 16, 64, 0.0, (96, 128, 160, 256), 8),
    "gpu": Load(512, 128, 192, 1.0, (256, 320), 4),
}


class Node(NamedTuple):
    """A running daemon: what is needed of its config, and the base model's weights."""

    root: Path
    results: Path
    socket: Path
    model: Path
    pid: int


class Turns:
    """Gives turns to evald and to the client, on one server."""

    def __init__(
        self, node: Node, server: Server, asks: list[Ask], in_flight: Sequence[int]
    ) -> None:
        self._node, self._server, self._asks = node, server, asks
        self._in_flight = itertools.cycle(in_flight)
        #: by number in flight, tokens/s.
        self.rates: dict[int, list[float]] = {}
        self.evald: list[float] = []
        self.client: list[float] = []
        #: CPU seconds of the daemon's process, and of this one, over all turns but the first.
        self.evald_cpu_s = self.client_cpu_s = 0.0
        self.points: list[PointRecord] = []

    def of_evald(self, step: int, *, tiny: bool) -> None:
        """Have a snapshot measured."""
        before_s = cpu_seconds(self._node.pid)
        directory = self._node.root / f"step_{step}"
        if tiny:
            write_snapshot(directory, seed=1)  # the same answers in each turn
        else:
            link_snapshot(self._node.model, directory)
        point = wait_for(self._node.results, step)
        if str(point.outcome) != "ok":
            raise SystemExit(f"step {step} ended {point.outcome}: {point.detail}")
        tokens = point.metrics[f"eval/{SET}/response_len/mean"] * len(self._asks)
        took = Took(len(self._asks), int(tokens), point.timings.evaluate_s)
        self.evald.append(took.tokens_per_s)
        self.evald_cpu_s += cpu_seconds(self._node.pid) - before_s
        self.points.append(point)
        show("evald", took)

    def of_client(self) -> None:
        """Send the same from here."""
        before_s, in_flight = time.process_time(), next(self._in_flight)
        took = asyncio.run(ask_all(self._server, self._asks, in_flight=in_flight, flush=True))
        self.rates.setdefault(in_flight, []).append(took.tokens_per_s)
        self.client.append(took.tokens_per_s)
        self.client_cpu_s += time.process_time() - before_s
        show("client", took)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sorted(LOADS), default="fake")
    parser.add_argument("--quick", action="store_true", help="fake engines, under a minute")
    parser.add_argument("--model", type=Path, help="base model of --engine gpu")
    parser.add_argument("--config", type=Path, help="config of a daemon that runs already")
    parser.add_argument("--first-step", type=int, default=1, help="with --config: first free step")
    parser.add_argument("--questions", type=int, help="in one turn")
    parser.add_argument("--tokens", type=int, help="longest response")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no round begins after that")
    args = parser.parse_args()
    load = LOADS["fake" if args.quick else args.engine]
    load = load._replace(
        questions=args.questions or load.questions,
        max_tokens=args.tokens or load.max_tokens,
        rounds=args.rounds or load.rounds,
    )
    if args.engine == "gpu" and args.model is None and args.config is None:
        parser.error("--engine gpu needs --model or --config")
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    try:
        data = write_questions(work / "throughput.jsonl", load)
        if args.config is not None:
            with borrowed(args.config, data, load) as node:
                figures = measure(node, load, data, args, first_step=args.first_step)
        else:
            with own(work, data, load, args) as node:
                figures = measure(node, load, data, args, first_step=1)
    finally:
        shutil.rmtree(work)
    print(json.dumps(figures))
    return 0


def measure(
    node: Node, load: Load, data: Path, args: argparse.Namespace, *, first_step: int
) -> dict[str, Any]:
    """Take turns; the figures."""
    began = time.monotonic()
    engine = until(lambda: ready(node), "an engine is ready", _START_S)
    server = server_of(engine["pid"])
    asks = asks_of(eval_set(data, load), node.model)
    tiny = args.engine != "gpu"
    if tiny:
        in_flight, rates = best_in_flight_of(server, asks, load)
        turns = Turns(node, server, asks, [in_flight])
    else:
        turns = Turns(node, server, asks, load.candidates)
    # the first point encodes the prompts and starts processes: it is no figure
    turns.of_evald(first_step, tiny=tiny)
    first, turns.evald_cpu_s = turns.evald.pop(), 0.0
    for number in range(load.rounds):
        if number and time.monotonic() - began > args.budget_s:
            break
        step = first_step + 1 + number
        # which of the two comes first changes: the machine's own drift cancels
        order = (turns.of_client, lambda step=step: turns.of_evald(step, tiny=tiny))
        for turn in order if number % 2 else order[::-1]:
            turn()
    evald, client = statistics.median(turns.evald), statistics.median(turns.client)
    pairs = zip(turns.evald, turns.client, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    if not tiny:
        rates = {n: statistics.median(each) for n, each in turns.rates.items()}
        in_flight = max(rates, key=lambda n: rates[n])
        client = rates[in_flight]
        ratio = evald / client
    asked = len(turns.evald) * len(asks)
    last = turns.points[-1].timings
    return {
        "name": "eval_throughput",
        "engine": "fake" if args.quick else args.engine,
        "ratio": round(ratio, 3),
        "evald_tokens_per_s": round(evald, 1),
        "client_tokens_per_s": round(client, 1),
        "first_point_ratio": round(first / client, 3),
        "client_in_flight": in_flight,
        "client_tried": {str(n): round(rate, 1) for n, rate in rates.items()},
        "spread": {
            "evald": round(max(turns.evald) / min(turns.evald), 3),
            "client": round(max(turns.client) / min(turns.client), 3),
        },
        "cpu_ms_per_sample": {
            "evald": round(1000 * turns.evald_cpu_s / asked, 3),
            "client": round(1000 * turns.client_cpu_s / asked, 3),
        },
        "questions": len(asks),
        "tokens_per_answer": round(turns.points[-1].metrics[f"eval/{SET}/response_len/mean"], 1),
        "rounds": len(turns.evald),
        "evaluate_s": round(last.evaluate_s, 3),
        "pin_s": round(last.pin_s, 3),
    }


def best_in_flight_of(server: Server, asks: list[Ask], load: Load) -> tuple[int, dict[int, float]]:
    """Let the client find its best, with what is enough to tell."""
    some = asks[: max(2 * max(load.candidates), len(asks) // 2)]
    return asyncio.run(best_in_flight(server, some, load.candidates))


def write_questions(path: Path, load: Load) -> Path:
    """Write a data set: prompts of letters that have nothing in common."""
    rng = random.Random(1)  # noqa: S311 - the same questions each time
    letters = "abcdefghijklmnopqrstuvwxyz "
    with path.open("w") as file:
        for _ in range(load.questions):
            text = "".join(rng.choices(letters, k=load.prompt_chars))
            file.write(json.dumps({"prompt": text, "label": "7"}) + "\n")
    return path


def eval_set(data: Path, load: Load) -> EvalSet:
    """Make the set as the config has it."""
    return EvalSet(
        name=SET,
        path=str(data),
        grader="boxed_exact",
        temperature=load.temperature,
        max_response_len=load.max_tokens,
    )


def table_of(data: Path, load: Load) -> str:
    """Write the set as the config's table."""
    return f"""
[[eval]]
name = "{SET}"
path = "{data}"
grader = "boxed_exact"
temperature = {load.temperature}
max_response_len = {load.max_tokens}
"""


@contextmanager
def own(work: Path, data: Path, load: Load, args: argparse.Namespace) -> Iterator[Node]:
    """Start a daemon with one engine."""
    options: dict[str, Any] = {}
    if args.quick or args.engine == "fake":
        options["python"] = write_fake_python(work / "python", decode=_DECODE)
    elif args.engine == "gpu":
        options["model"] = args.model
        options["posture"] = (
            f'[fleet]\nmodel = "{args.model}"\ndevice = "cuda"\nengines = 1\n'
            f"[fleet.sglang]{_GPU_ARGUMENTS}"
        )
    with rig(work, sets=False, tables=table_of(data, load), **options) as r:
        pid = r.start().pid
        yield Node(r.root, work / "results", work / "evald.sock", r.model, pid)


@contextmanager
def borrowed(path: Path, data: Path, load: Load) -> Iterator[Node]:
    """Give the load to a running daemon as one more set; afterwards it has its config again."""
    before = path.read_text()
    config: Config = load_config(path)
    if config.fleet is None or config.status.socket is None:
        raise SystemExit(f"{path} needs [fleet] and status.socket")
    path.write_text(before + table_of(data, load))
    try:
        reload(path)
        yield Node(
            Path(config.staging.root),
            Path(config.results.dir),
            Path(config.status.socket),
            Path(config.fleet.model),
            json.loads(ask(Path(config.status.socket), "/status"))["pid"],
        )
    finally:
        path.write_text(before)
        reload(path)


def reload(config: Path) -> None:
    """Have the daemon read its config again."""
    command = [sys.executable, "-m", "evald", "ctl", "reload", "--target", str(config)]
    subprocess.run(command, check=True, timeout=60)


def ready(node: Node) -> dict[str, Any] | None:
    """Return the first engine, if it can be asked."""
    status = json.loads(ask(node.socket, "/status"))
    engine: dict[str, Any] = status["engines"][0]
    return engine if engine["state"] in {"ready", "serving"} else None


def wait_for(results: Path, step: int) -> PointRecord:
    """Wait for the terminal record of a step."""
    deadline = time.monotonic() + _POINT_S
    ledger, seen_bytes = results / "results.jsonl", -1
    while time.monotonic() < deadline:
        # reading costs the core that the engine wants
        if ledger.exists() and (size_bytes := ledger.stat().st_size) != seen_bytes:
            seen_bytes = size_bytes
            for record in read_records(ledger):
                if isinstance(record, PointRecord) and record.step == step:
                    return record
        time.sleep(_POLL_S)
    raise SystemExit(f"step {step} has not ended within {_POINT_S:g} s")


def link_snapshot(model: Path, directory: Path) -> None:
    """Make a snapshot of a model's files, within a file system without copying; marker last."""
    directory.mkdir()
    for path in model.iterdir():
        if not path.is_file():
            continue
        try:
            os.link(path, directory / path.name)
        except OSError:
            shutil.copyfile(path, directory / path.name)
    (directory / ".complete").touch()


def show(who: str, took: Took) -> None:
    """Tell how a turn went."""
    print(f"{who:7}{took.seconds:8.3f} s{took.tokens_per_s:10.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
