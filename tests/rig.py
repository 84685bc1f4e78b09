"""A daemon as a real process, with its surroundings: what daemon tests share."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from evald.engines.guard import descendants, read_stat
from evald.results.follow import read_records
from evald.results.records import AnyRecord, PointRecord
from evald.testing import write_base_model

_CONFIG = """
run = "t"
[staging]
root = "{root}"
scan_interval_s = 0.5
{staging}
[dispatch]
{dispatch}
[results]
dir = "{work}/results"
{results}
[status]
socket = "{work}/evald.sock"
{status}
{tables}
{posture}
{sets}
"""
_FLEET = """
[fleet]
model = "{model}"
device = "cpu"
stop_grace_s = 5
{fleet}
"""
_SETS = """
[defaults]
grader = "boxed_exact"
max_response_len = 16
[[eval]]
name = "a"
path = "{work}/a.jsonl"
[[eval]]
name = "b"
path = "{work}/b.jsonl"
"""


def kill_tree(pid: int) -> None:
    """SIGKILL one process that the test started."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until ``condition`` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def ask(path: Path, what: str) -> bytes:
    """GET over a unix socket; the body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection("localhost", timeout=5)
    with closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5)
        connection.sock.connect(os.fspath(path))
        connection.request("GET", what)
        return connection.getresponse().read()


class Rig:
    """Directories, a config, and at most one running daemon.

    ``python``: the engines' interpreter (a fake one: ``write_fake_python``); None: real SGLang.
    ``posture``: another table than [fleet], with ``{model}`` in it; ``sets``: with eval sets.
    """

    def __init__(
        self,
        work: Path,
        *,
        python: Path | None = None,
        model: Path | None = None,
        questions: int = 10,
        label: str = "7",
        posture: str = "",
        sets: bool = True,
        **tables: str,
    ) -> None:
        self.work = work
        self.root = Path(tempfile.mkdtemp(prefix="evald-test-", dir="/dev/shm"))
        self.root.chmod(0o755)
        self.model = model or write_base_model(work / "base")
        for name in "ab":
            rows = [{"prompt": f"{name}{i}?", "label": label} for i in range(questions)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (work / f"{name}.jsonl").write_text(text)
        self.config = work / "config.toml"
        fleet = tables.get("fleet", "engines = 1")
        if python is not None:
            fleet = f'python = "{python}"\n{fleet}'
        self.config.write_text(
            _CONFIG.format(
                root=self.root,
                work=work,
                posture=(posture or _FLEET.replace("{fleet}", fleet)).replace(
                    "{model}", str(self.model)
                ),
                sets=_SETS.format(work=work) if sets else "",
                staging=tables.get("staging", ""),
                dispatch=tables.get("dispatch", ""),
                results=tables.get("results", ""),
                status=tables.get("status", ""),
                tables=tables.get("tables", ""),
            )
        )
        self.results = work / "results" / "results.jsonl"
        self.daemon: subprocess.Popen[bytes] | None = None
        self._starts = 0
        #: pid -> start, in clock ticks since the machine's boot.
        self._noted: dict[int, int] = {}

    def start(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start the daemon and wait until it serves; ``before``: a program that starts it."""
        self._starts += 1
        with (self.work / f"evald.{self._starts}.log").open("wb") as log:
            self.daemon = subprocess.Popen(
                [*before, sys.executable, "-m", "evald", "run", str(self.config), *arguments],
                stdout=log,
                stderr=log,
                cwd=self.work,
            )
        daemon = self.daemon
        until(lambda: self.state() == "serving" or daemon.poll() is not None, "the daemon serves")
        assert daemon.poll() is None, self.log()
        return daemon

    def log(self) -> str:
        """What the newest daemon has logged."""
        return (self.work / f"evald.{self._starts}.log").read_text()

    def status(self) -> dict[str, Any]:
        """Ask the running daemon; empty while there is none. Not its file: that is a second old."""
        daemon = self.daemon
        if daemon is None:
            return {}
        try:
            status: dict[str, Any] = json.loads(ask(self.work / "evald.sock", "/status"))
        except (OSError, http.client.HTTPException):  # not yet, no more, or not at the moment
            return {}
        return status if status["pid"] == daemon.pid else {}

    def state(self) -> str | None:
        """State of the daemon by its status."""
        return self.status().get("state")

    def records(self) -> list[AnyRecord]:
        """All records of the ledger."""
        return read_records(self.results) if self.results.exists() else []

    def points(self) -> list[PointRecord]:
        """All terminal records."""
        return [record for record in self.records() if isinstance(record, PointRecord)]

    def point(self, step: int, *, revision: int = 0, timeout_s: float = 30.0) -> PointRecord:
        """Wait for the terminal record of one point."""

        def find() -> PointRecord | None:
            for point in self.points():
                if (point.step, point.revision) == (step, revision):
                    return point
            return None

        try:
            found: PointRecord = until(find, f"step {step} has its record", timeout_s)
        except AssertionError:
            print(self.log()[-5000:])
            raise
        return found

    def note_processes(self) -> None:
        """Remember all processes below the daemon, whatever they call themselves."""
        if self.daemon is not None:
            for pid in (self.daemon.pid, *descendants(self.daemon.pid)):
                if (stat := read_stat(pid)) is not None:
                    self._noted[pid] = stat.start_ticks

    def processes(self) -> list[int]:
        """Living processes of this rig: daemons, guards, engines and theirs, workers."""
        self.note_processes()
        return [
            pid
            for pid, start_ticks in self._noted.items()
            if (stat := read_stat(pid)) and stat.start_ticks == start_ticks and stat.state != "Z"
        ]

    def kill(self) -> None:
        """SIGKILL the daemon, as the kernel would."""
        assert self.daemon is not None
        self.note_processes()
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait(10)

    def evald(
        self, *arguments: str, before: Sequence[str] = (), timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run an evald command to its end."""
        return subprocess.run(
            [*before, sys.executable, "-m", "evald", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.work,
            check=False,
        )

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and the exit code."""
        assert self.daemon is not None
        self.note_processes()
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout_s)

    def close(self) -> None:
        """End everything and remove the staging root."""
        self.note_processes()
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(30)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        for pid in self.processes():
            kill_tree(pid)
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def rig(work: Path, **settings: Any) -> Iterator[Rig]:
    """Give a Rig that is closed at the end."""
    made = Rig(work, **settings)
    try:
        yield made
    finally:
        made.close()
