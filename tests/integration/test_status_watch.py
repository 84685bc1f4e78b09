"""``evald status --watch`` on a real terminal, as text and over TCP, beside a real daemon."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from rig import Rig, rig, until

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

TOKEN = "a-token-of-many-characters"  # noqa: S105 - of a daemon that lives for one test


class Viewer:
    """The command on a terminal of its own; ``frame`` is what a person sees."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self._master, self.slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        # keys are signals only for the session whose terminal it is
        words = ["setsid", "--ctty", sys.executable, "-m", "evald", "status", *arguments]
        self.process = subprocess.Popen(
            [*words, "--watch", "--interval", "0.1"],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **env},
        )
        self._said = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._said += data
        except OSError:  # closed
            return

    @property
    def said(self) -> str:
        """All that was written, with its escape sequences."""
        return bytes(self._said).decode(errors="replace")

    def rows(self, *, colour: bool = False) -> list[str]:
        """The newest whole frame."""
        frame = self.said.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        rows = [row.rstrip("\r").removesuffix("\x1b[K") for row in frame.split("\n")]
        return rows if colour else [re.sub(r"\x1b\[\d+m", "", row) for row in rows]

    def shows(self, pattern: str) -> bool:
        """Whether any row of the newest frame has it."""
        return any(re.search(pattern, row) for row in self.rows())

    def until(self, pattern: str) -> None:
        """Wait for it."""
        try:
            until(lambda: self.shows(pattern), pattern)
        except AssertionError:
            print("\n".join(self.rows()))
            raise

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """Wait for the exit code; the terminal must be as it was."""
        code = self.process.wait(30)
        until(
            lambda: self.said.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l"), "the screen is given back"
        )
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        os.close(self.slave)
        os.close(self._master)
        self._reader.join(30)


@contextmanager
def viewer(*arguments: str, **env: str) -> Iterator[Viewer]:
    made = Viewer(*arguments, **env)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def plain(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The command with its output in a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "evald", "status", *arguments, "--watch", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        process.wait(30)


def block(output: IO[str] | None) -> str:
    """Read to the next empty line."""
    assert output is not None
    rows = []
    while row := output.readline().rstrip("\n"):
        rows.append(row)
    return "\n".join(rows)


def block_with(output: IO[str] | None, text: str) -> str:
    for _ in range(200):
        found = block(output)
        if text in found:
            return found
    raise AssertionError(f"no block with {text!r}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Rig]:
    """A daemon whose points take several seconds; it answers on TCP, too."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    python = write_fake_python(tmp_path / "python", delay_s=1.2)
    status = f'listen = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"'
    fleet = "engines = 1\nmax_requests = 32"
    with rig(tmp_path, python=python, questions=64, status=status, fleet=fleet) as made:
        made.start()
        yield made


def test_a_terminal_shows_a_point_as_it_runs_and_a_daemon_that_comes_back(node: Rig) -> None:
    write_snapshot(node.root / "step_1", seed=1, answer=7)
    with viewer(str(node.config)) as view:
        view.until(r"engine-0 serving     1:\w{8}\S* +\d+ +\d+ +\d+%    0        0$")
        view.until(r"^    a        ▆+▁* +\d+/64  1\.000 +(\d+s left|done)$")
        assert view.said.startswith("\x1b[?1049h\x1b[?25l\x1b[?7l")
        assert "\x1b[32mserving\x1b[0m" in "\n".join(view.rows(colour=True))
        assert len(view.rows()) <= 24
        view.until(r"^  a        1\.000±\.\d{3}$")  # it has ended
        assert view.shows(r"^ended    1 ok")
        view.resize(60, 12)
        until(lambda: len(view.rows()) == 12 and max(map(len, view.rows())) <= 60, "it is smaller")
        node.kill()
        view.until(r"^NO ANSWER for \d+s, below is the last one: cannot ask the$")
        view.resize(80, 24)
        node.start()
        view.until(rf"^evald .* pid {node.status()['pid']} ")
        assert not view.shows("NO ANSWER")
        view.type(b"q")
        assert view.end() == 0


def test_the_terminal_is_given_back_whatever_ends_it(node: Rig) -> None:
    with viewer(str(node.config), NO_COLOR="1") as view:
        view.until("engine-0 ")
        assert not re.search(r"\x1b\[\d+m", view.said)
        view.type(b"x\x1a")  # no key of ours; then Ctrl-Z
        until(lambda: _state(view.process.pid) == "T", "it is suspended")
        until(lambda: view.said.endswith("\x1b[?1049l"), "the screen is the shell's")
        assert termios.tcgetattr(view.slave) == view.before
        view.process.send_signal(signal.SIGCONT)
        until(lambda: view.said.count("\x1b[?1049h") == 2 and view.shows("engine-0 "), "it is back")
        view.type(b"\x03")
        assert view.end() == 130
    with viewer(str(node.config)) as view:
        view.until("engine-0 ")
        view.process.send_signal(signal.SIGTERM)
        assert view.end() == 128 + signal.SIGTERM


def test_elsewhere_it_is_text_at_each_change_also_over_tcp(node: Rig, tmp_path: Path) -> None:
    url = f"http://{node.status()['listen']}"
    token_file = str(tmp_path / "token")
    with plain(url, "--token-file", token_file) as watch:
        first = block(watch.stdout)
        assert first.startswith("evald ")
        assert "\x1b" not in first
        write_snapshot(node.root / "step_1", seed=1, answer=7)
        block_with(watch.stdout, "running (1 of 2)\n  t step 1 ")
        ended = block_with(watch.stdout, "ended    1 ok")
        assert re.search(r"^  b        1\.000[^ ]+\.\d{3}$", ended, re.MULTILINE)
        node.kill()
        gone = block_with(watch.stdout, "evald: cannot ask the daemon at http://127.0.0.1:")
        assert gone.count("\n") == 0
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 130


def test_what_cannot_be_watched_is_said_as_without_watch(node: Rig, tmp_path: Path) -> None:
    url = f"http://{node.status()['listen']}"
    refused = node.evald("status", url, "--watch")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "refuses the token" in refused.stderr
    nobody = node.evald("status", str(tmp_path / "results"), "--watch", "--json")
    assert nobody.returncode == 2
    with plain(str(node.config)) as watch:
        assert block(watch.stdout)
        assert watch.stdout is not None
        watch.stdout.close()  # such as ``| head``: noticed although nothing changes
        assert watch.wait(30) == 141
    node.stop()
    nobody = node.evald("status", str(node.config), "--watch")
    assert (nobody.returncode, nobody.stdout) == (3, "")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
