"""One chaos run: its processes, kept alive as systemd would, and the faults that hit them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from evald.engines.guard import descendants
from evald.results.follow import read_records
from evald.results.records import Accepted, AnyRecord, PointRecord, RunEnd
from evald.testing import write_base_model, write_fake_python

from .faults import FAULTS, send
from .places import Places
from .plan import VARY, Plan, write_plan
from .setting import DECODE, FAKE, REAL, write_config

#: SIGTERM to the end of the daemon.
STOP_S = 30.0
TICK_S, LOOK_S = 0.02, 0.1
#: what stands in the command line of a process of the daemon's.
COMMANDS = {"engine": "evald.testing", "guard": "guard.py", "worker": "evals.worker "}


class World:
    """Builds everything for ``plan``; :meth:`run` goes through it, :meth:`close` leaves nothing."""

    def __init__(self, plan: Plan, *, room_s: float = 1.0, real: bool = False) -> None:
        """``room_s``: how long the trainer waits for room.

        The trainer begins a step once there are few snapshots in the root, or after that.
        """
        self.plan = plan
        self._words: list[str] = []
        self._room_s = room_s
        self._times = REAL if real else FAKE
        self.places = Places()
        work = self.places.work
        write_base_model(work / "base")
        self._engine_faults = self.places.control / "engines"
        write_fake_python(work / "python", vary=VARY, fault_file=self._engine_faults, decode=DECODE)
        self.config = write_config(self.places, plan, real=real)
        self.ledger = self.places.results / "results.jsonl"
        self._board = self.places.root / ".evald" / "status.json"
        self.progress = work / "progress"
        self._plan_file = write_plan(work / "plan.json", plan)
        #: specs of fault points for the daemon's next life.
        self.next_at: list[str] = []
        #: steps whose bytes a fault has touched.
        self.touched: set[int] = set()
        #: what went wrong while it ran, in words.
        self.problems: list[str] = []
        #: what has hit so far.
        self.hits: list[str] = []
        self.lives = {"daemon": 0, "trainer": 0}
        self.most_bytes = 0
        self._daemon: subprocess.Popen[bytes] | None = None
        self._trainer: subprocess.Popen[bytes] | None = None
        self._trained = False
        self._first = 0
        #: where the trainer's newest life began, and its first life since the last reboot.
        self._began = 0
        self._since_life = 0
        #: when what has not ended by then counts as lost; None: that time has not begun.
        self.give_up: float | None = None
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._rng = random.Random(plan.seed + 1)  # noqa: S311 - a schedule, no secret

    def add_words(self, *words: str) -> None:
        """Give the daemon more arguments."""
        self._words += words

    # --- what faults do ------------------------------------------------------------------------

    @property
    def daemon_pid(self) -> int | None:
        """The daemon, if it lives."""
        return self._daemon.pid if self._daemon and self._daemon.poll() is None else None

    @property
    def trainer_pid(self) -> int | None:
        """The trainer, if it lives."""
        return self._trainer.pid if self._trainer and self._trainer.poll() is None else None

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self._due.append((time.monotonic() + delay_s, action))

    def pick(self, rng: random.Random, kind: str) -> int | None:
        """Choose one of the daemon's processes."""
        if self.daemon_pid is None:
            return None
        if kind == "engine":
            with suppress(OSError, ValueError):
                engines = json.loads(self._board.read_bytes())["engines"]
                pids: list[int] = [engine["pid"] for engine in engines if engine["pid"]]
                return rng.choice(pids) if pids else None
        found: list[int] = []
        for pid in descendants(self.daemon_pid):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if COMMANDS[kind].encode() in command:
                    found.append(pid)
        return rng.choice(found) if found else None

    def set_control(self, name: str, content: str, for_s: float | None = None) -> None:
        """Tell the daemon's process of a fault, for a while."""
        path = self.places.control / name
        fresh = path.with_suffix(".new")
        fresh.write_text(content)
        fresh.replace(path)
        if for_s is not None:
            self.later(for_s, lambda: path.unlink(missing_ok=True))

    def script_engines(self, faults: dict[str, list[str]]) -> None:
        """Let the engine that sees it first answer so."""
        fresh = self._engine_faults.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.replace(self._engine_faults)

    def damage(self, rng: random.Random) -> None:
        """Cut or remove a snapshot that has its marker."""
        marked = [path.parent for path in self.places.root.glob("step_*/.complete")]
        if not marked:
            return
        victim = rng.choice(sorted(marked))
        self.touched.add(int(victim.name.removeprefix("step_")))
        with suppress(OSError):  # it was just deleted
            if rng.random() < 0.5:
                shutil.rmtree(victim)
            else:
                os.truncate(victim / "model.safetensors", 1000)

    def tidy_root(self) -> None:
        """Remove what was never ours there."""
        for path in self.places.root.glob("core.*"):
            path.unlink(missing_ok=True)

    def reboot(self) -> None:
        """End all processes at once and lose the root; the trainer goes on where it was durable."""
        for pid in self.places.processes():
            send(pid, signal.SIGKILL)
        for process in (self._daemon, self._trainer):
            if process is not None:
                process.wait(10)
        known = {record.step for record in self.records() if isinstance(record, Accepted)}
        self.touched |= known
        done = [line for line in self.told() if line["state"] == "done" and "step" in line]
        ended = {point.step for point in self.points()}
        lost = [line["number"] for line in done if line["step"] not in known | ended]
        self._first = min([*lost, self._first])
        self._since_life = self.lives["trainer"]
        self._trained = False
        self.places.lose_root()
        for name in ("clock", "disk"):
            (self.places.control / name).unlink(missing_ok=True)

    # --- what can be read ----------------------------------------------------------------------

    def records(self) -> list[AnyRecord]:
        """All records of the ledger."""
        return read_records(self.ledger)

    def points(self) -> list[PointRecord]:
        """All terminal records."""
        return [record for record in self.records() if isinstance(record, PointRecord)]

    def told(self) -> list[dict[str, Any]]:
        """What the trainer says that it did."""
        if not self.progress.exists():
            return []
        lines = self.progress.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def log(self, life: int | None = None) -> str:
        """What a life of the daemon has said."""
        path = self.places.work / f"daemon.{life or self.lives['daemon']}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- the run -------------------------------------------------------------------------------

    def run(self) -> None:
        """Go through the plan; what goes wrong is in ``problems``."""
        self._wait_until_serving()
        started = time.monotonic()
        for one in self.plan.faults:
            self._due.append((started + one.at_s, self._hit(one.name)))
        next_look = 0.0
        while True:
            self._keep_daemon()
            self._keep_trainer()
            self._do_due()
            if self._trained and not self._due:
                now = time.monotonic()
                self.give_up = self.give_up or now + self._times.end_s
                if now > next_look:
                    next_look = now + LOOK_S
                    waiting = self.open_words()
                    if not waiting:
                        break
                    if now > self.give_up:
                        self.problems.append(f"not ended within {self._times.end_s:g} s: {waiting}")
                        break
            self._sample_budget()
            time.sleep(TICK_S)
        self.stop()

    def _wait_until_serving(self) -> None:
        """Let nothing happen before the daemon takes anything in: it would only queue up."""
        self.give_up = None
        while True:
            self._keep_daemon()  # (where it was killed on purpose, the time begins again)
            self.give_up = self.give_up or time.monotonic() + self._times.start_s
            if self.serves() or time.monotonic() > self.give_up:
                break
            time.sleep(TICK_S)
        self.give_up = None
        if self.serves():
            return
        self.problems.append(
            f"the daemon does not serve within {self._times.start_s:g} s: {self.log()[-500:]}"
        )

    def serves(self) -> bool:
        """Whether this life of the daemon has said that it has an engine that works."""
        with suppress(OSError, ValueError):
            status = json.loads(self._board.read_bytes())
            working = {"ready", "pinning", "serving", "draining"}
            return status["pid"] == self.daemon_pid and any(
                engine["state"] in working for engine in status["engines"]
            )
        return False

    def _hit(self, name: str) -> Callable[[], None]:
        def hit() -> None:
            self.hits.append(name)
            FAULTS[name].hit(self, self._rng)

        return hit

    def _do_due(self) -> None:
        now = time.monotonic()
        due = [one for one in self._due if one[0] <= now]
        self._due = [one for one in self._due if one[0] > now]
        for _, action in sorted(due, key=lambda one: one[0]):
            action()

    def _keep_daemon(self) -> None:
        if self._daemon is not None and self._daemon.poll() is not None:
            self._judge_exit(self._daemon.returncode)
            self._daemon = None
        if self._daemon is None:
            self._daemon = self._start_daemon()

    def _keep_trainer(self) -> None:
        if self._trainer is not None and self._trainer.poll() is not None:
            code, self._trainer = self._trainer.returncode, None
            if code > 0:
                self.problems.append(f"the trainer ended with {code}: {self._trainer_log()}")
            self._trained = code >= 0
        if self._trainer is None and not self._trained:
            self._trainer = self._start_trainer()

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        self.lives["daemon"] += 1
        words = ["--control", str(self.places.control), "--quick", *self._words]
        for spec in self.next_at:
            words += ["--at", spec]
        self.next_at = []
        return self._start("daemon", ["chaos.daemon", str(self.config), *words])

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        # what was done before a reboot may have been lost in it
        done = [
            line["number"]
            for line in self.told()
            if line["state"] != "begin" and line["life"] >= self._since_life
        ]
        life = self.lives["trainer"]
        if life and self._first == len(self.plan.actions):
            first = max([*done, self._began - 1]) + 1 - self._rng.randint(0, 4)
            self._first = min(max(first, 0), len(self.plan.actions) - 1)
        elif not life:
            self._first = 0
        first, self._first = self._first, len(self.plan.actions)
        self._began = first
        self.lives["trainer"] += 1
        places = self.places
        paths = [self._plan_file, places.root, places.outside, self.progress]
        words = [
            "--results",
            str(places.results),
            "--from",
            str(first),
            "--life",
            str(life),
            "--room-s",
            str(self._room_s),
        ]
        return self._start("trainer", ["chaos.trainer", *map(str, paths), *words])

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        with (self.places.work / f"{name}.{self.lives[name]}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=log,
                stderr=log,
                cwd=self.places.work,
                env=environ,
            )

    def _judge_exit(self, code: int) -> None:
        """See why the daemon ended: by a signal, or by itself with a good reason."""
        log = self.log()
        if "Traceback (most recent call last)" in log and code > 0:
            self.problems.append(f"the daemon had a bug: ...{log[-3000:]}")
        excused = any(FAULTS[name].may_end_daemon for name in self.hits)
        if code > 0 and not excused:
            last = log.strip().splitlines()[-1:]
            self.problems.append(f"the daemon ended by itself with {code}: {last}")

    def _trainer_log(self) -> str:
        return (self.places.work / f"trainer.{self.lives['trainer']}.log").read_text()[-2000:]

    def _sample_budget(self) -> None:
        used = 0
        with suppress(OSError):
            for directory in self.places.root.glob("step_*"):
                used += sum(path.stat().st_size for path in directory.glob("*"))
        self.most_bytes = max(self.most_bytes, used)

    def open_words(self) -> str:
        """Say what has not ended yet; empty when all has."""
        records = self.records()
        points = [record for record in records if isinstance(record, PointRecord)]
        ended = {(point.kind, point.step, point.revision) for point in points}
        waiting = [
            f"step {record.step}.r{record.revision} was accepted"
            for record in records
            if isinstance(record, Accepted)
            and (record.kind, record.step, record.revision) not in ended
        ]
        steps = {point.step for point in points}
        waiting += [
            f"step {line['step']} was dropped ({line['how']})"
            for line in self.told()
            if line["state"] == "done" and "step" in line
            # (what somebody deletes before evald has seen it never was)
            if line["step"] not in steps | self.touched
        ]
        if not any(isinstance(record, RunEnd) for record in records):
            waiting.append("the run has no end")
        return "; ".join(dict.fromkeys(waiting))

    def stop(self) -> None:
        """SIGTERM; the daemon must end well."""
        code = self._terminate()
        if code < 0:  # the last fault was just under way, or it had no handlers yet
            self._daemon = self._start_daemon()
            self._wait_until_serving()
            code = self._terminate()
        if code != 0:
            self.problems.append(f"the daemon's stop ended with {code}: {self.log()[-500:]}")

    def _terminate(self) -> int:
        if self._daemon is None:
            return 0
        self._daemon.send_signal(signal.SIGTERM)
        try:
            return self._daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the daemon did not stop within {STOP_S:g} s")
            return 0

    def close(self) -> None:
        """End and remove everything."""
        for process in (self._daemon, self._trainer):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.places.processes():
            send(pid, signal.SIGKILL)
        self.places.close()
