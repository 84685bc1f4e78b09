from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from process_tree import Tree, is_alive, wait_until

from evald.engines import leftovers
from evald.engines.leftovers import PidFile, pid_file, reap_leftovers, write_pid_file


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.clean_up()


@pytest.fixture
def leader(tree: Tree) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        tree.argv("stubborn"), start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    tree.wait_started()
    yield process
    process.kill()
    process.wait(10)


def change(path: Path, **values: object) -> None:
    recorded = msgspec.json.decode(path.read_bytes(), type=PidFile)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(recorded, **values)))


def test_kills_exactly_what_was_recorded(tmp_path: Path, leader: subprocess.Popen[bytes]) -> None:
    log = tmp_path / "engines" / "e0" / "1.log"
    log.parent.mkdir(parents=True)
    write_pid_file(log, leader.pid)
    assert pid_file(log).name == "1.log.pid"
    assert reap_leftovers(tmp_path) == [leader.pid]
    assert not is_alive(leader.pid)
    assert not pid_file(log).exists()
    assert reap_leftovers(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_spares_who_only_has_the_same_pid(
    tmp_path: Path, leader: subprocess.Popen[bytes], wrong: dict[str, object]
) -> None:
    log = tmp_path / "1.log"
    write_pid_file(log, leader.pid)
    change(pid_file(log), **wrong)
    assert reap_leftovers(tmp_path) == []
    assert is_alive(leader.pid)
    assert not pid_file(log).exists()


def test_spares_who_leads_no_session(tmp_path: Path, tree: Tree) -> None:
    process = subprocess.Popen(tree.argv(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        tree.wait_started()
        write_pid_file(tmp_path / "1.log", process.pid)
        assert reap_leftovers(tmp_path) == []
        assert is_alive(process.pid)
    finally:
        process.kill()
        process.wait(10)


def test_forgets_the_dead_and_what_it_cannot_read(tmp_path: Path) -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    write_pid_file(tmp_path / "1.log", process.pid)
    process.kill()
    process.wait(10)
    write_pid_file(tmp_path / "2.log", process.pid)
    (tmp_path / "3.log.pid").write_bytes(b'{"pid": 12')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.log.pid", "3.log.pid"]
    assert reap_leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_keeps_the_file_of_what_survives(
    tmp_path: Path, leader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "1.log"
    write_pid_file(log, leader.pid)
    monkeypatch.setattr(leftovers, "group_members", lambda group: [group])
    assert leftovers.kill_group(leader.pid, 0.05) == [leader.pid]
    assert wait_until(lambda: not is_alive(leader.pid))
    monkeypatch.setattr(leftovers, "kill_group", lambda group: [group])
    assert reap_leftovers(tmp_path) == [leader.pid]
    assert pid_file(log).exists()


def test_group_members_are_the_living(leader: subprocess.Popen[bytes]) -> None:
    assert leftovers.group_members(leader.pid) == [leader.pid]
    os.killpg(leader.pid, 9)
    assert wait_until(lambda: leftovers.group_members(leader.pid) == [])
