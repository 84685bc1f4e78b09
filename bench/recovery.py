"""From kill -9 of one of three engines, in the middle of a point, to full strength again.

A whole daemon with real SGLang in CPU mode; ``--quick``: with fake engines that keep a core busy
for some seconds before they answer. Each round kills another engine. ``recovery_s`` is from the
kill until all three serve the point again, by stages of the daemon's log; ``ratio`` compares it
with a plain start of the same server and a plain update to the same snapshot, done in the same
round, while the same two others work and the third one is frozen. ``others_ratio``: answers for
each second of these two while the third one comes back, against before the kill;
``others_over_alone``: against the two alone, with nobody starting beside them. ``first_ready_s``
and ``all_ready_s``: from the daemon's start, which loads a few engines at a time.

Goal: ``ratio`` <= 1.3 (the first restart waits 1 s on purpose), and others that lose no more than
the processor time that a start takes from them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_log import events, seconds
from daemon_rig import Rig, rig, until
from engine_server import Server, command_line, server_of

from evald.engines.ports import free_port
from evald.testing import write_base_model, write_snapshot

ENGINES = 3
#: so that a frozen engine is taken for nothing but a slow one.
FLEET = f"""engines = {ENGINES}
probe_interval_s = 60
"""
#: a fake engine's imports, in seconds of a core.
FAKE_START_S = 2.0
#: in flight, and how long each takes: the two cores are not full of it.
FAKE_FLEET = FLEET + "max_requests = 8\n"
FAKE_ANSWER_S = 0.1
START_S = 300.0
#: from one event in the log to the next.
STAGES = ("noticed_s", "launched_s", "ready_s", "pinned_s")


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fake engines, one round")
    parser.add_argument("--rounds", type=int, default=None, help="1 to 3: each engine dies once")
    args = parser.parse_args()
    rounds = min(args.rounds or (1 if args.quick else ENGINES), ENGINES)
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    try:
        figures = measure(work, rounds, quick=args.quick)
    finally:
        shutil.rmtree(work)
    print(json.dumps(figures))
    return 0


def measure(work: Path, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Start everything, kill an engine in each round; medians over the rounds."""
    python = write_slow_python(work / "python") if quick else None
    window_s = 2.0 if quick else 5.0
    base = write_base_model(work / "base")
    settings = {"fleet": FAKE_FLEET if quick else FLEET}
    with rig(work, python=python, model=base, questions=30_000, **settings) as r, forced(r):
        began = time.monotonic()
        r.start()
        ready_s = [until_up(r, "ready", count) - began for count in (1, ENGINES)]
        snapshot = write_snapshot(r.root / "step_0", seed=0)
        rows = []
        for victim in range(rounds):
            until_up(r, "serving", ENGINES)
            rows.append(Round(r, victim, snapshot, window_s).run())
            print(json.dumps(rows[-1]))
        if r.points():
            raise SystemExit("cannot measure: the point has ended before the last round")
    figures: dict[str, Any] = {
        "name": "recovery",
        "engines": "fake" if quick else "real SGLang, CPU mode",
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "first_ready_s": round(ready_s[0], 2),
        "all_ready_s": round(ready_s[1], 2),
    }
    for name in rows[0]:
        figures[name] = round(statistics.median(row[name] for row in rows), 3)
    return figures


class Round:
    """One engine is frozen beside a plain start, then killed; the others' answers all the while."""

    def __init__(self, r: Rig, victim: int, snapshot: Path, window_s: float) -> None:
        self._r = r
        self._victim = victim
        self._snapshot = snapshot
        self._window_s = window_s

    def run(self) -> dict[str, float]:
        """Return the round's figures; seconds, but for the ratios."""
        engine = self._r.status()["engines"][self._victim]
        pid, name = int(engine["pid"]), str(engine["name"])
        time.sleep(self._window_s)  # everybody has found its pace
        before = self._rate(lambda: time.sleep(self._window_s))
        with frozen(pid):
            alone = self._rate(lambda: time.sleep(self._window_s))
            began = time.monotonic()
            with_plain = self._rate(lambda: plain_start(pid, self._snapshot))
            plain_s = time.monotonic() - began
        until(lambda: self._answers(self._victim), "the frozen engine is back", START_S)
        time.sleep(self._window_s)
        before_it = len(self._r.log())
        killed = time.time()
        meanwhile = self._rate(lambda: self._kill(pid, before_it, name))
        stages = stages_of(self._r.log()[before_it:], name, killed)
        return {
            "plain_s": round(plain_s, 2),
            **stages,
            "recovery_s": round(sum(stages.values()), 2),
            "ratio": round(sum(stages.values()) / plain_s, 3),
            "others_ratio": round(meanwhile / before, 3),
            "others_over_alone": round(meanwhile / alone, 3),
            "others_beside_plain": round(with_plain / alone, 3),
        }

    def _kill(self, pid: int, before_it: int, name: str) -> None:
        os.kill(pid, signal.SIGKILL)
        until(
            lambda: is_back(self._r.log()[before_it:], name),
            f"{name} serves the point again",
            START_S,
        )

    def _rate(self, action: Any) -> float:
        """Return answers for each second of the other two while ``action`` runs."""
        others = [number for number in range(ENGINES) if number != self._victim]
        before, began = sum(map(self._answers, others)), time.monotonic()
        action()
        return (sum(map(self._answers, others)) - before) / (time.monotonic() - began)

    def _answers(self, number: int) -> int:
        return int(self._r.status()["engines"][number]["answers"])


# --- the daemon's log ----------------------------------------------------------------------------


def events_of(log: str, engine: str) -> Iterator[tuple[str, float]]:
    """Yield what happened to an engine, and when, in seconds since the epoch."""
    for event in events(log):
        if event.get("engine") == engine:
            yield (
                event["new"] if event["event"] == "engine_state" else event["event"],
                seconds(event),
            )


def is_back(log: str, engine: str) -> bool:
    """Tell whether the engine serves again."""
    return "serving" in dict(events_of(log, engine))


def stages_of(log: str, engine: str, killed: float) -> dict[str, float]:
    """Return how long each stage of the recovery took."""
    first: dict[str, float] = {}
    for name, at in events_of(log, engine):
        first.setdefault(name, at)
    ends = [first[name] for name in ("unhealthy", "engine_process_started", "ready", "serving")]
    begins = [killed, *ends]
    pairs = zip(STAGES, begins, ends, strict=False)
    return {stage: round(end - begin, 3) for stage, begin, end in pairs}


# --- engines -------------------------------------------------------------------------------------


def until_up(r: Rig, state: str, count: int) -> float:
    """Wait until so many engines are in this state; when they were."""

    def up() -> bool:
        states = [str(engine["state"]) for engine in r.status().get("engines", [])]
        return states.count(state) >= count

    until(up, f"{count} engines are {state}", START_S)
    return time.monotonic()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Let an engine's processes take no processor time."""
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGCONT)


@contextmanager
def forced(r: Rig) -> Iterator[None]:
    """Let the daemon end without the rest of its point."""
    try:
        yield
    finally:
        if r.daemon is not None and r.daemon.poll() is None:
            r.note_processes()
            for _ in range(2):
                r.daemon.send_signal(signal.SIGTERM)
                time.sleep(0.5)


def plain_start(like: int, snapshot: Path) -> None:
    """Start the same server as process ``like`` on a port of its own, and update it; then end it.

    Nothing is proven. (Its end takes some 50 ms, which count with it.)
    """
    argv = command_line(like)
    environ = Path(f"/proc/{like}/environ").read_bytes().decode().split("\0")[:-1]
    port = free_port()
    argv[argv.index("--port") + 1] = str(port)
    plain = Server(f"http://127.0.0.1:{port}", server_of(like).api_key)
    with (snapshot.parents[0] / ".plain.log").open("wb") as log:
        server = subprocess.Popen(
            argv,
            env=dict(pair.split("=", 1) for pair in environ),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(lambda: is_up(server, plain), "the plain server answers", START_S)
        body = {"model_path": str(snapshot), "weight_version": "plain", "load_format": "auto"}
        plain.ask("/update_weights_from_disk", body, timeout_s=START_S)
        if plain.ask("/model_info")["weight_version"] != "plain":
            raise SystemExit("the plain server does not serve the snapshot")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_up(process: subprocess.Popen[bytes], server: Server) -> bool:
    """Tell whether a server generates; SystemExit when it has ended."""
    if process.poll() is not None:
        raise SystemExit(f"the plain server ended with code {process.returncode}")
    try:
        server.ask("/health_generate", timeout_s=START_S)
    except OSError:
        return False
    return True


def write_slow_python(path: Path) -> Path:
    """Write an executable for ``[fleet] python``: a FakeEngine whose imports take their time."""
    code = (
        "import runpy, time\n"
        f"while time.process_time() < {FAKE_START_S}: pass\n"
        "runpy.run_module('evald.testing', run_name='__main__', alter_sys=True)"
    )
    path.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@" --delay-s {FAKE_ANSWER_S}\n'
    )
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    raise SystemExit(main())
