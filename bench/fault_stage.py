"""A daemon with one engine, on which faults are tried out: provoke, look on, count what is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from daemon_log import events, seconds
from daemon_rig import Rig
from engine_server import server_of

from evald.engines.guard import LEAKING, SHARED_MEMORY, all_pids, descendants, read_stat
from evald.engines.guard import shared_memory as mapped_memory
from evald.results.records import PointRecord
from evald.results.samples import SampleRecord
from evald.testing import write_base_model, write_snapshot

POLL_S = 0.1
#: far above a start of real SGLang on two busy cores; nothing here waits longer.
PATIENCE_S = 240.0
#: processes of an old life may still be seen for a moment while they end.
ORPHAN_GRACE_S = 3.0
#: states in which a server is being got rid of.
DOWN = {"unhealthy", "tainted", "quarantined"}
ENGINE = "engine-0"
FLEET = """
[fleet]
model = "{{model}}"
python = "{python}"
device = "cpu"
engines = 1
stop_grace_s = {grace_s}
load_timeout_s = {load_s}
probe_interval_s = {interval_s}
probe_timeout_s = {timeout_s}
probe_failures = 2
start_timeout_s = {start_s}
"""
#: seconds; two busy cores must not look like a fault.
REAL = {"grace_s": 3.0, "load_s": 15.0, "interval_s": 2.0, "timeout_s": 5.0}
QUICK = {"grace_s": 0.5, "load_s": 2.0, "interval_s": 0.5, "timeout_s": 0.5}
#: the engine's interpreter; a launch waits while there is a file `squat`, so that its port can be
#: taken between evald's choice of it and the engine's bind.
PYTHON = """#!/bin/sh
case "$*" in *--port*)
  if [ -e {work}/squat ]; then
    echo "$*" > {work}/argv.new && mv {work}/argv.new {work}/argv
    while [ -e {work}/squat ]; do sleep 0.05; done
  fi;;
esac
exec {engine}
"""
T = TypeVar("T")


class Change(msgspec.Struct, frozen=True):
    """One change of the engine's state, as the daemon logged it."""

    time: float
    old: str
    new: str


class Stage:
    """One daemon and one engine: real SGLang in CPU mode, or a fake one.

    ``questions``: of each of the two eval sets. ``staging``: lines of that table.
    """

    def __init__(
        self, work: Path, *, real: bool, questions: int, staging: str, start_s: float
    ) -> None:
        self.real = real
        self.work = work
        engine = f'"{sys.executable}" "$@"'
        if not real:
            engine = f'"{sys.executable}" -m evald.testing "$@" --delay-s 0.3'
        python = work / "python"
        python.write_text(PYTHON.format(work=work, engine=engine))
        python.chmod(0o755)
        limits = REAL if real else QUICK
        self.rig = Rig(
            work,
            model=write_base_model(work / "base", answer=1),
            questions=questions,
            staging=staging,
            posture=FLEET.format(python=python, start_s=start_s, **limits),
        )
        self._memory_before = set(_leaking())
        self._read = 0
        self._began = 0.0
        self._tree: list[int] = []

    # --- waiting and looking ---------------------------------------------------------------------

    def wait(
        self, condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S
    ) -> T:
        """Poll, and note every process that shows up meanwhile; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.rig.note_processes()
            if value := condition():
                return value
            time.sleep(POLL_S)
        raise TimeoutError(f"not within {timeout_s:g} s: {what}")

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        """Events of the daemon's log since the last ``mark``."""
        return (one for one in events(self.rig.log()[self._read :]) if one["event"] == name)

    def changes(self) -> list[Change]:
        """Read the changes of the engine's state since the last ``mark``."""
        return [
            Change(seconds(event), event["old"], event["new"])
            for event in self.events("engine_state")
        ]

    def path(self) -> list[str]:
        """Tell the engine's states since the last ``mark``; empty when nothing has changed."""
        changes = self.changes()
        return [changes[0].old, *[change.new for change in changes]] if changes else []

    def recovered(self) -> bool:
        """Tell whether the engine has served a snapshot since it was last down."""
        last_first = self.path()[::-1]
        up = [number for number, state in enumerate(last_first) if state == "serving"]
        down = [number for number, state in enumerate(last_first) if state in DOWN]
        return bool(up) and (not down or up[0] < down[0])

    def seconds_until(self, change: Change) -> float:
        """From the last ``mark`` to a change of state."""
        return change.time - self._began

    def status(self) -> dict[str, Any]:
        """Read of the engine in status.json (up to a second old)."""
        engines: list[dict[str, Any]] = self.rig.status().get("engines") or [{}]
        return engines[0]

    def until_up(self) -> None:
        """Wait until the engine can be given work."""
        states = {"ready", "serving"}
        self.wait(lambda: _newest(self.rig.log(), "engine_state", "new") in states, "it is up")

    def mark(self) -> None:
        """Begin: this is the moment of the fault."""
        self.rig.note_processes()
        self._tree = self.engine_tree()
        self._read = len(self.rig.log())
        self._began = time.time()

    # --- points ----------------------------------------------------------------------------------

    def drop(self, step: int) -> None:
        """Drop a good snapshot."""
        write_snapshot(self.rig.root / f"step_{step}", seed=step, answer=1)

    def samples(self, step: int) -> list[SampleRecord]:
        """Read the point's journals."""
        found = []
        for path in (self.work / "results/samples/t" / f"step_{step}.r0").glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            found += [msgspec.json.decode(line, type=SampleRecord) for line in whole.splitlines()]
        return found

    def point(self, step: int) -> PointRecord:
        """Wait for the point's record."""
        return self.wait(
            lambda: next((point for point in self.rig.points() if point.step == step), None),
            f"step {step} has its record",
        )

    # --- processes -------------------------------------------------------------------------------

    def launcher(self) -> int:
        """Process id of the engine's newest launcher, alive or not."""
        return int(_newest(self.rig.log(), "engine_process_started", "pid") or 0)

    def engine_tree(self) -> list[int]:
        """All processes of the engine, its guard first; empty when it is down."""
        stat = read_stat(self.launcher())
        return [] if stat is None else [stat.parent, *descendants(stat.parent)]

    def process(self, name: str) -> int:
        """Find one process of the engine: "guard", "launcher", "scheduler", "detokenizer".

        A fake engine is one process. Waits for one that is not there yet.
        """
        if name == "guard":
            return self.engine_tree()[0]
        if name == "launcher" or not self.real:
            return self.launcher()
        title = f"sglang::{name}".encode()
        return self.wait(
            lambda: next((pid for pid in self.engine_tree() if _title(pid, title)), 0),
            f"there is a {name}",
        )

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process of the engine."""
        os.kill(self.process(name), number)

    def relaunch(self) -> None:
        """Let an operator restart the engine; returns when the new launcher runs."""
        old = self.launcher()
        done = self.rig.evald("ctl", "restart", ENGINE, "--target", str(self.rig.config))
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.wait(lambda: self.launcher() != old, "a new launcher runs")

    def post(self, path: str, body: object) -> None:
        """Send the engine a request behind evald's back; its answer is of no interest."""
        try:
            server_of(self.launcher()).ask(path, body, timeout_s=5)
        except (OSError, ValueError) as error:
            print(f"  ({path}: {error})", flush=True)

    @contextmanager
    def squatter(self, *, silent: bool) -> Iterator[None]:
        """Restart the engine, and take the port that it was given just before it is bound."""
        squat, argv_file = self.work / "squat", self.work / "argv"
        squat.touch()
        self.relaunch()
        self.wait(argv_file.exists, "the launch is held")
        argv = argv_file.read_text().split()
        argv_file.unlink()
        port = argv[argv.index("--port") + 1]
        self.mark()
        with _silent(int(port)) if silent else _foreign(self.rig.model, port):
            squat.unlink()
            yield

    def orphans(self) -> list[int]:
        """Find processes that outlived their engine, or that have left the daemon's tree."""
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while (left := self._orphans()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def _orphans(self) -> list[int]:
        daemon = self.rig.daemon
        if daemon is None or daemon.poll() is not None:
            return self.rig.processes()
        below = {daemon.pid, *descendants(daemon.pid)}
        if self._tree and self.engine_tree()[:1] != self._tree[:1]:
            below -= set(self._tree)
        return [pid for pid in self.rig.processes() if pid not in below]

    def leftovers(self) -> list[str]:
        """Find shared memory that is new since the last look, and that nobody holds any more."""
        held = {path for pid in all_pids() for path in mapped_memory(pid)}
        left = [path for path in _leaking() if path not in held | self._memory_before]
        self._memory_before |= set(left)
        return left

    def stop(self) -> None:
        """End the daemon as an operator does; raises RuntimeError when it does not end well."""
        daemon = self.rig.daemon
        if daemon is not None and daemon.poll() is None and self.rig.stop(60) != 0:
            raise RuntimeError(f"the daemon stopped badly:\n{self.rig.log()[-3000:]}")

    def close(self, *, keep: bool) -> None:
        """End what is left, and remove every trace, but for the files that shall be looked at."""
        self.rig.close()
        if keep:
            print(f"kept: {self.work}")
        else:
            shutil.rmtree(self.work, ignore_errors=True)


@contextmanager
def _silent(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


@contextmanager
def _foreign(model: Path, port: str) -> Iterator[None]:
    command = [sys.executable, "-m", "evald.testing", "--model-path", str(model), "--port", port]
    server = subprocess.Popen([*command, "--weight-version", "foreign"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(POLL_S)
        yield
    finally:
        server.kill()
        server.wait()


def _leaking() -> list[str]:
    folder = Path(SHARED_MEMORY)
    return [str(path) for path in folder.iterdir() if path.name.startswith(LEAKING)]


def _title(pid: int, title: bytes) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title)
    except OSError:
        return False


def _newest(log: str, name: str, field: str) -> Any:
    """Read a field of the last event of this name; None when there is none."""
    found = None
    for event in events(log):
        if event["event"] == name:
            found = event[field]
    return found
