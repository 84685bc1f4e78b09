"""Programs with a deadline: all end, none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evald.engines.guard import read_stat
from evald.trainer.push.process import Command, failed, run_all


def sh(script: str, stdin: bytes = b"") -> Command:
    return Command(["sh", "-c", script], stdin)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def is_gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state == "Z"


def wait_until_gone(pid: int) -> None:
    deadline = soon(10)
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)


def test_what_programs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    large = b"x" * 1_000_000  # more than any pipe holds
    done = run_all([sh("cat; echo $LC_ALL >&2", large), sh("exit 0")], soon())
    assert failed(done) is None
    assert (done[0].out.encode(), done[0].err) == (large, "C\n")


def test_a_failure_ends_the_others_and_is_the_one_told(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begun = time.monotonic()
    done = run_all(
        [
            sh(f"echo $$ > {pid_file}; sleep 60 & sleep 60"),
            sh(f"while [ ! -s {pid_file} ]; do sleep 0.01; done; echo why >&2; exit 7"),
        ],
        soon(),
    )
    assert time.monotonic() - begun < 15
    bad = failed(done)
    assert bad is not None
    assert (bad.code, bad.err) == (7, "why\n")
    assert done[0].code == -signal.SIGKILL
    assert is_gone(int(pid_file.read_text()))


def test_a_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        run_all([sh(f"sleep 60 & echo $! > {pid_file}; wait")], soon(1.5))
    wait_until_gone(int(pid_file.read_text()))


def test_a_program_that_is_not_there() -> None:
    bad = failed(run_all([Command(["/no/such/program"])], soon()))
    assert bad is not None
    assert "cannot start /no/such/program: No such file or directory" in bad.err


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import time; from evald.trainer.push.process import Command, run_all\n"
        f"run_all([Command(['sh', '-c', 'echo $$ > {pid_file}; exec sleep 60'])],"
        " time.monotonic() + 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = soon()
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    wait_until_gone(int(pid_file.read_text()))
