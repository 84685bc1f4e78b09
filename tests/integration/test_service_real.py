"""The shipped unit under a real systemd: ready, status, reload, restart, watchdog, stop.

One machine for all, in the order of a service's life.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_systemd import CONFIG, Machine, machine, missing
from rig import until

from evald.engines.guard import read_stat

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

#: a daemon that is hung by a file, in the middle of a write of its status.
_STUCK = """
import os, sys, time
from evald import cli
from evald.status.board import Board
write = Board._write
def hang(self, content):
    while os.path.exists("/srv/hang"):
        time.sleep(0.05)
    write(self, content)
Board._write = hang
sys.exit(cli.main())
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("systemd")) as made:
        made.systemctl("start", "evald")
        made.wait_ready()
        yield made


def gone(processes: list[int]) -> bool:
    return all((stat := read_stat(pid)) is None or stat.state == "Z" for pid in processes)


def publish(node: Machine, step: int) -> None:
    """Write a snapshot as the trainer's user: in its group, and as nobody that evald knows."""
    code = (
        "import sys; from pathlib import Path; from evald.testing import write_snapshot; "
        f"write_snapshot(Path('/dev/shm/evald/step_{step}'), seed={step}, answer=7)"
    )
    user = ("setpriv", "--reuid", "trainer", "--regid", "trainers", "--init-groups")
    node.run(*user, "/opt/evald/venv/bin/python", "-c", code)


def points(node: Machine) -> list[tuple[object, object]]:
    return [(one["step"], one["outcome"]) for one in node.records() if one["type"] == "point"]


def test_it_is_ready_as_a_user_without_rights_and_says_how_far_it_is(node: Machine) -> None:
    assert node.show("StatusText") == "serving; 1 of 1 engines ready; 0 running, 0 queued"
    status = Path(f"/proc/{node.main_pid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] != "0"
    assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_engines_keep_kernels_in_the_cache_directory(node: Machine) -> None:
    environments = [
        Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in node.service_processes()
    ]
    engines = [one for one in environments if b"SGLANG_USE_CPU_ENGINE=1" in one]
    assert engines
    for one in engines:
        assert b"TVM_FFI_CACHE_DIR=/var/cache/evald/tvm-ffi" in one
        assert not [word for word in one if word.startswith(b"NOTIFY_SOCKET")]
    cache = node.root / "var/cache/evald"
    assert cache.stat().st_uid == (node.root / "var/lib/evald").stat().st_uid


def test_what_the_trainers_user_writes_is_measured_and_deleted(node: Machine) -> None:
    publish(node, 1)
    until(lambda: points(node) == [(1, "ok")], "the point has its record")
    until(lambda: not (node.root / "dev/shm/evald/step_1").exists(), "the snapshot is deleted")


def test_the_journal_has_priorities(node: Machine) -> None:
    priority = {
        str(entry["MESSAGE"]).split(" ", 1)[0]: entry["PRIORITY"]
        for entry in node.journal_entries()
    }
    assert (priority["ready"], priority["point_ended"]) == ("6", "6")
    assert not [word for word in priority if word.startswith("<")]
    assert re.search(r"^point_ended point=t\S+1\S* outcome=ok ", node.journal(), re.MULTILINE)


def test_a_reload_is_said_and_changes_what_it_can(node: Machine) -> None:
    before = node.show("MainPID")
    config = node.root / "etc/evald/evald.toml"
    config.write_text(CONFIG.replace("engines = 1", "engines = 2"))
    node.systemctl("reload", "evald")
    until(
        lambda: node.show("StatusText").endswith("; needs a restart: fleet.engines"),
        "the status says what needs a restart",
    )
    config.write_text(CONFIG + "[")
    node.systemctl("reload", "evald")
    until(lambda: "the old one stays: cannot parse" in node.show("StatusText"), "and what is bad")
    config.write_text(CONFIG)
    node.systemctl("reload", "evald")
    until(lambda: node.show("StatusText").endswith("0 queued"), "all is well again")
    assert (node.show("ActiveState"), node.show("MainPID")) == ("active", before)


def test_after_a_kill_it_comes_back_and_nothing_is_left(node: Machine) -> None:
    old = node.service_processes()
    assert len(old) >= 3  # daemon, guard, engine
    node.systemctl("kill", "-s", "KILL", "--kill-who=main", "evald")
    until(lambda: node.show("NRestarts") == "1", "it is restarted")
    node.wait_ready()
    until(lambda: gone(old), "nothing of the old one is left")


def test_the_watchdog_ends_a_daemon_in_which_a_loop_stands_still(node: Machine) -> None:
    (node.root / "srv/stuck.py").write_text(_STUCK)
    start = "/opt/evald/venv/bin/python /srv/stuck.py run /etc/evald/evald.toml"
    drop_in = node.root / "etc/systemd/system/evald.service.d/stuck.conf"
    drop_in.write_text(f"[Service]\nExecStart=\nExecStart={start}\n")
    node.systemctl("daemon-reload")
    node.systemctl("restart", "evald")
    node.wait_ready()
    old = node.service_processes()
    (node.root / "srv/hang").touch()
    until(lambda: node.show("StatusText").startswith("stuck, status: "), "the status names it")
    until(lambda: node.show("NRestarts") == "1", "the watchdog ends it")
    (node.root / "srv/hang").unlink()
    node.wait_ready()
    assert gone(old)
    said = node.journal()
    assert "loop_stuck detail=\"status: 'gets on' since" in said
    assert "Watchdog timeout" in said
    assert re.search(r'File "/srv/stuck.py", line \d+ in hang', said)  # where it hung
    drop_in.unlink()
    node.systemctl("daemon-reload")


def test_a_stop_drains(node: Machine) -> None:
    old = node.service_processes()
    publish(node, 2)
    until(
        lambda: (2, "accepted") in [(one.get("step"), one["type"]) for one in node.records()],
        "it is to be measured",
    )
    node.systemctl("stop", "evald")
    assert (node.show("ActiveState"), node.show("Result")) == ("inactive", "success")
    assert points(node) == [(1, "ok"), (2, "ok")]
    assert gone(old)
    assert node.service_processes() == []


def test_a_bad_config_is_not_tried_again(node: Machine) -> None:
    (node.root / "etc/evald/evald.toml").write_text(CONFIG + "[")
    node.systemctl("start", "evald", check=False)
    assert (node.show("ActiveState"), node.show("ExecMainStatus")) == ("failed", "78")
    assert node.show("NRestarts") == "0"
