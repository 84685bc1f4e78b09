from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from process_tree import Tree, is_alive, wait_until

from evald.engines import guard


class Daemon:
    """What the daemon is to a guard: the holder of the lifeline and the reader of its lines."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.guards: list[subprocess.Popen[str]] = []

    def start(self, *argv: str) -> subprocess.Popen[str]:
        # Without -I -S, so that coverage sees it.
        process = subprocess.Popen(
            [sys.executable, guard.__file__, str(self.log_path), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.guards.append(process)
        return process


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def send(process: subprocess.Popen[str], line: str) -> None:
    pipe(process.stdin).write(line)
    pipe(process.stdin).flush()


def rest(process: subprocess.Popen[str]) -> list[str]:
    lines = pipe(process.stdout).read().splitlines()
    assert process.wait(10) == 0
    return lines


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.clean_up()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "engine.log")
    yield daemon
    for process in daemon.guards:
        pipe(process.stdin).close()
        process.wait(10)
        pipe(process.stdout).close()


def test_reports_the_whole_life(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("exit3"))
    lines = rest(process)
    assert lines == [f"started {tree.pids()['launcher']}", "exited 3", "gone"]
    log = daemon.log_path
    assert log.read_text().splitlines() == ["hello from the engine", "and its errors"]
    assert log.stat().st_mode & 0o777 == 0o600


def test_engine_leads_its_own_session_with_default_signals(daemon: Daemon, tree: Tree) -> None:
    daemon.start("--", *tree.argv())
    pid = tree.wait_started()["launcher"]
    stat = guard.read_stat(pid)
    assert stat is not None
    assert (stat.group, stat.session) == (pid, pid)
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
    masks = sum(1 << (signum - 1) for signum in guard.DEFERRED)
    assert int(ignored.split()[1], 16) & masks == 0


def test_stop_lets_the_launcher_end_and_kills_all_others(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("polite", "children"))
    pids = tree.wait_started()
    assert set(pids) == {"launcher", "child", "session", "orphan"}
    send(process, "stop 30\n")
    assert rest(process)[1:] == ["exited 0", "gone"]
    assert tree.is_gone()


def test_stop_kills_after_the_grace(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("stubborn", "children"))
    tree.wait_started()
    begin = time.monotonic()
    send(process, "stop 0.4\n")
    assert rest(process)[1:] == ["exited -9", "gone"]
    assert 0.4 <= time.monotonic() - begin < 5
    assert tree.is_gone()


def test_a_later_stop_shortens_the_grace_and_never_extends_it(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("stubborn"))
    tree.wait_started()
    begin = time.monotonic()
    send(process, "stop 60\nstop 0.1\nst")
    send(process, "op 60\n")
    assert rest(process)[1:] == ["exited -9", "gone"]
    assert time.monotonic() - begin < 5


def test_end_of_the_daemon_kills_all_at_once(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("stubborn", "children"))
    tree.wait_started()
    begin = time.monotonic()
    pipe(process.stdin).close()
    assert rest(process)[1:] == ["exited -9", "gone"]
    assert time.monotonic() - begin < 5
    assert tree.is_gone()


def test_end_of_the_launcher_kills_what_it_left(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("children"))
    os.kill(tree.wait_started()["launcher"], signal.SIGKILL)
    assert rest(process)[1:] == ["exited -9", "gone"]
    assert tree.is_gone()


def test_signals_to_the_guard_do_nothing(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("polite"))
    pid = tree.wait_started()["launcher"]
    for signum in guard.DEFERRED:
        process.send_signal(signum)
    time.sleep(0.3)
    assert process.poll() is None
    assert is_alive(pid)
    send(process, "stop 30\n")
    assert rest(process)[1:] == ["exited 0", "gone"]


def test_death_of_the_guard_kills_the_launcher(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("stubborn"))
    pid = tree.wait_started()["launcher"]
    process.kill()
    process.wait(10)
    assert wait_until(lambda: not is_alive(pid))


def test_a_daemon_that_reads_no_more_does_not_hinder(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("polite", "children"))
    tree.wait_started()
    pipe(process.stdout).close()
    send(process, "stop 30\n")
    assert process.wait(10) == 0
    assert tree.is_gone()


def test_a_line_that_it_does_not_know_ends_everything(daemon: Daemon, tree: Tree) -> None:
    process = daemon.start("--", *tree.argv("stubborn", "children"))
    tree.wait_started()
    send(process, "stop soon\n")
    assert pipe(process.stdout).read().splitlines()[1:] == ["exited -9", "gone"]
    assert process.wait(10) == 1
    assert tree.is_gone()
    assert "ValueError" in daemon.log_path.read_text()


def test_says_what_it_cannot_execute(daemon: Daemon) -> None:
    lines = rest(daemon.start("--", "/nowhere/python", "-V"))
    reason = "cannot execute /nowhere/python: No such file or directory"
    assert lines == [f"failed {reason}", "gone"]


def test_says_that_it_cannot_write_the_log(daemon: Daemon, tree: Tree) -> None:
    daemon.log_path = daemon.log_path / "not" / "there"
    lines = rest(daemon.start("--", *tree.argv()))
    assert lines == [f"failed cannot write the log {daemon.log_path}: No such file or directory"]


def test_wants_a_command(daemon: Daemon) -> None:
    assert daemon.start("--").wait(10) == 1


def test_read_stat_of_nobody() -> None:
    assert guard.read_stat(2**22 + 1) is None


@pytest.mark.parametrize("how", ["stop", "daemon dies"])
def test_removes_the_engines_shared_memory_and_no_other_file(
    daemon: Daemon, tree: Tree, tmp_path: Path, how: str
) -> None:
    nonce = f"{os.getpid()}_{tmp_path.name}"
    snapshots = Path(f"/dev/shm/evald-test-{nonce}")
    snapshots.mkdir()
    ours = Path(f"/dev/shm/sglang_loads_{nonce}.shm")
    others = [Path(f"/dev/shm/other_{nonce}"), snapshots / "sglang_loads_x.safetensors"]
    try:
        mapped = ",".join(str(path) for path in (ours, *others))
        process = daemon.start("--", *tree.argv("memory", mapped))
        tree.wait_started()
        assert ours.exists()
        if how == "stop":
            send(process, "stop 0.2\n")
        else:
            pipe(process.stdin).close()
        assert rest(process)[-1] == "gone"
        assert not ours.exists()
        assert all(path.exists() for path in others)
    finally:
        for path in (ours, *others):
            path.unlink(missing_ok=True)
        snapshots.rmdir()


def test_knows_new_shared_memory_before_a_sudden_death(
    daemon: Daemon, tree: Tree, tmp_path: Path
) -> None:
    ours = Path(f"/dev/shm/sglang_loads_{os.getpid()}_{tmp_path.name}.shm")
    try:
        process = daemon.start("--", *tree.argv("memory", str(ours)))
        launcher = tree.wait_started()["launcher"]
        lines = [pipe(process.stdout).readline() for _ in range(2)]  # within a second or two
        assert lines == [f"started {launcher}\n", f"memory {ours}\n"]
        os.kill(launcher, signal.SIGKILL)  # and nobody is left who could be asked
        assert rest(process) == ["exited -9", "gone"]
        assert not ours.exists()
    finally:
        ours.unlink(missing_ok=True)
