from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from evald.demo.children import Child, interruptions, stop_all, wait_gone

STUBBORN = (
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
)


def start(tmp_path: Path, code: str, lock: int) -> Child:
    command = [sys.executable, "-u", "-c", code]
    return Child("child", command, log=tmp_path / "child.log", env=dict(os.environ), lock=lock)


def until_up(child: Child) -> None:
    deadline = time.monotonic() + 20
    while "up" not in child.last_words() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "up" in child.last_words()


def test_log_and_exit_code(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        child = start(tmp_path, "print('one'); print('two'); raise SystemExit(3)", lock.fileno())
        assert wait_gone([child.pid], 20) == []
    assert child.poll() == 3
    assert child.last_words(1) == ["two"]
    assert child.failure().splitlines() == [
        f"child ended with exit code 3; the end of {child.log}:",
        "    one",
        "    two",
    ]


def test_sigterm_is_enough_for_most(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        child = start(tmp_path, "import time; print('up'); time.sleep(60)", lock.fileno())
        until_up(child)
        assert stop_all([child], grace_s=20, hurry=lambda: False) == []
        assert child.poll() == -signal.SIGTERM
        assert stop_all([child], grace_s=20, hurry=lambda: False) == []


@pytest.mark.parametrize(("grace_s", "hurried"), [(0.2, False), (60.0, True)])
def test_who_ignores_sigterm_is_killed(tmp_path: Path, grace_s: float, hurried: bool) -> None:
    with (tmp_path / "lock").open("w") as lock:
        child = start(tmp_path, STUBBORN, lock.fileno())
        until_up(child)
        assert wait_gone([child.pid], 0.1) == [child.pid]
        started = time.monotonic()
        assert stop_all([child], grace_s=grace_s, hurry=lambda: hurried) == ["child"]
        assert time.monotonic() - started < 10
        assert child.poll() == -signal.SIGKILL


def test_signals_are_counted_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interruptions() as counter:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert counter.count == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptions() as counter:
            os.kill(os.getpid(), signal.SIGHUP)
            assert counter.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)
