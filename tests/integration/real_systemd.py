"""A real systemd as PID 1 of namespaces of its own, with the service that ships with evald.

Needs root, unshare and Debian's systemd. Nothing outside the namespaces changes: /etc is a copy,
/run, /srv, /opt, /var/lib, /var/cache, /var/log and /dev/shm are empty and in memory.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rig import kill_tree, until

from evald.engines.guard import descendants
from evald.testing import write_base_model
from evald.testing.fake_launcher import write_fake_python

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
IN_MEMORY = ("/run", "/srv", "/var/lib", "/var/cache", "/var/log", "/opt")
#: Of the hardening nothing is dropped. What is different here: the rest of a system's units is not
#: there, and nobody waits two minutes for a watchdog.
DROP_IN = """
[Unit]
DefaultDependencies=no
[Service]
WatchdogSec=6
RestartSec=100ms
"""
TARGET = """
[Unit]
DefaultDependencies=no
AllowIsolate=yes
Wants=systemd-journald.service
"""
CONFIG = """
run = "t"
[staging]
root = "/dev/shm/evald"
keep = 0
scan_interval_s = 0.5
[dispatch]
drain_timeout_s = 30
[results]
dir = "/var/lib/evald/t"
[fleet]
model = "/srv/base"
device = "cpu"
engines = 1
python = "/srv/python"
[[eval]]
name = "a"
path = "/srv/a.jsonl"
grader = "boxed_exact"
max_response_len = 16
"""


def missing() -> str:
    """Say why there can be no such machine here; empty where there can."""
    if os.geteuid() != 0:
        return "namespaces with a systemd in them need root"
    needed = (str(SYSTEMD), "unshare", "nsenter", "systemd-sysusers", "systemd-tmpfiles")
    absent = [name for name in needed if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Machine:
    """The namespaces, seen from outside."""

    def __init__(self, work: Path, pid: int) -> None:
        self.work = work
        #: systemd's, as it is outside.
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-p", "-m", "-u", "-i", "-C", *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def systemctl(self, *words: str, check: bool = True) -> str:
        """Run systemctl; its output."""
        done = self.run("systemctl", *words, check=False)
        assert done.returncode == 0 or not check, done.stderr + self.journal()
        return done.stdout

    def show(self, name: str) -> str:
        """Return one property of the service."""
        return self.systemctl("show", "evald.service", "-p", name, "--value").strip()

    def main_pid(self) -> int:
        """Return the daemon's process id, as it is outside."""
        inside = int(self.show("MainPID"))
        for pid in descendants(self.pid):
            status = Path(f"/proc/{pid}/status").read_text()
            (numbers,) = [x for x in status.splitlines() if x.startswith("NSpid:")]
            if int(numbers.split()[-1]) == inside:
                return pid
        raise AssertionError(f"process {inside} is not there")

    def wait_ready(self) -> None:
        """Wait until the service is active, with its engine."""
        ready = "1 of 1 engines ready"
        try:
            until(
                lambda: self.show("ActiveState") == "active" and ready in self.show("StatusText"),
                "the service is ready",
                40,
            )
        except AssertionError:
            print(self.systemctl("status", "evald", check=False), self.journal())
            raise

    def journal(self) -> str:
        """Return what the service has logged."""
        return self.run("journalctl", "-u", "evald", "-o", "cat", "--no-pager", check=False).stdout

    def journal_entries(self) -> list[dict[str, object]]:
        """Return the same with all fields."""
        lines = self.run("journalctl", "-u", "evald", "-o", "json", "--no-pager").stdout
        return [json.loads(line) for line in lines.splitlines()]

    def records(self) -> list[dict[str, object]]:
        """Return all records of the ledger."""
        path = self.root / "var/lib/evald/t/results.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def service_processes(self) -> list[int]:
        """Return the processes in the service's control group."""
        found = []
        for pid in descendants(self.pid):
            try:
                groups = Path(f"/proc/{pid}/cgroup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if "/evald.service" in groups:
                found.append(pid)
        return found


@contextmanager
def machine(work: Path) -> Iterator[Machine]:
    """Boot, with evald installed as the README says and not yet started."""
    (work / "inside.sh").write_text(_inside(work))
    (work / "in").mkdir()
    write_base_model(work / "in/base")
    write_fake_python(work / "in/python", delay_s=0.2)
    rows = [json.dumps({"prompt": f"{i}?", "label": "7"}) for i in range(20)]
    (work / "in/a.jsonl").write_text("\n".join(rows))
    (work / "in/evald.toml").write_text(CONFIG)
    words = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup")
    with (work / "systemd.log").open("wb") as log:
        outer = subprocess.Popen(
            ["unshare", *words, "sh", "-e", str(work / "inside.sh")], stdout=log, stderr=log
        )
    inner: list[int] = []
    try:

        def booted() -> bool:
            inner[:] = descendants(outer.pid)[:1]
            return outer.poll() is not None or bool(
                inner and (Path(f"/proc/{inner[0]}/root/run/systemd/private").exists())
            )

        until(booted, "systemd runs")
        assert outer.poll() is None, (work / "systemd.log").read_text()
        yield Machine(work, inner[0])
    finally:
        for pid in inner:  # with PID 1 all others of its namespace go
            kill_tree(pid)
        kill_tree(outer.pid)
        outer.wait(20)


def _inside(work: Path) -> str:
    """Write the script that becomes PID 1."""
    etc, given = work / "etc", work / "in"
    lines = [
        "mount --make-rprivate /",
        f"cp -a /etc {etc}",
        f"mount --bind {etc} /etc",
        "mount -t proc proc /proc",
        *_opened([Path(sys.prefix), Path(sys.base_prefix), REPOSITORY]),
        *(f"mount -t tmpfs -o mode=755 tmpfs {place}" for place in IN_MEMORY),
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        "mkdir -p /opt/evald/venv /run/systemd/system",
        f"mount --bind {shlex.quote(sys.prefix)} /opt/evald/venv",
        f"cp -a {given}/. /srv/",
        "groupadd -f trainers && useradd -g trainers trainer",
        f"cd {shlex.quote(str(REPOSITORY))}",
        *install_lines(),
        f"install -D -m644 {work}/drop-in.conf /etc/systemd/system/evald.service.d/test.conf",
        # (nobody outside has asked for an audit)
        "ln -s /dev/null /run/systemd/system/systemd-journald-audit.socket",
        f"cp {work}/test.target /run/systemd/system/",
        f"exec env -i container=test PATH=$PATH {SYSTEMD} --unit=test.target --show-status=0",
    ]
    # the service has a /tmp of its own; this checkout may lie in the other one
    places = dict.fromkeys([REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)])
    hidden = [path for path in places if path.is_relative_to("/tmp")]
    binds = "".join(f"BindReadOnlyPaths={path}\n" for path in hidden)
    (work / "drop-in.conf").write_text(DROP_IN + binds)
    (work / "test.target").write_text(TARGET)
    return "\n".join(lines) + "\n"


def install_lines() -> list[str]:
    """Return the README's lines that install the service, up to its start."""
    text = (REPOSITORY / "README.md").read_text()
    block = text.partition("### As a service")[2].partition("```bash\n")[2].partition("```")[0]
    lines = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    assert len(lines) == 10
    # the environment is there, and how it starts is the test's business
    return [
        line.replace("node.toml", "/srv/evald.toml")
        for line in lines
        if "pip install" not in line and "systemctl" not in line
    ]


def _opened(paths: list[Path]) -> list[str]:
    """Mount what lies in closed directories (/root) so that every user reaches it."""
    closed: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        for above in reversed(path.parents):
            if not above.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(above, []).append(path)
                break
    held = "/mnt/held"
    lines = ["mount -t tmpfs tmpfs /mnt"] if closed else []
    for number, (above, inside) in enumerate(closed.items()):
        for index, path in enumerate(inside):
            place = f"{held}/{number}-{index}"
            lines += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(above))}")
        for index, path in enumerate(inside):
            where = shlex.quote(str(path))
            lines += [f"mkdir -p {where}", f"mount --bind {held}/{number}-{index} {where}"]
    return lines
