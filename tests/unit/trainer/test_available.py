"""Host memory that is left: the machine's, and what a container may have of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evald.trainer.export.available import available_bytes


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    write(tmp_path / "proc", meminfo="MemFree:  1 kB\nMemAvailable:  1000 kB\n")
    return tmp_path / "proc"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def second(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    stat = f"anon 5\ninactive_file {cached - 1}\nactive_file 1\n" if cached else ""
    write(folder, memory__max=f"{limit}\n", memory__current=f"{used}\n", memory__stat=stat)


def test_without_groups_it_is_the_machine_s(tmp_path: Path, proc: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 1_024_000
    (proc / "meminfo").unlink()
    assert available_bytes(proc, tmp_path / "none") is None
    assert available_bytes() is not None  # of this machine


def test_the_smallest_group_around_it_counts(tmp_path: Path, proc: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/job/task\n")
    groups = tmp_path / "groups"
    second(groups / "job" / "task", "max", 5)
    second(groups / "job", "5000", 3000, cached=500)
    assert available_bytes(proc, groups) == 2500
    second(groups / "job" / "task", "900", 1000)
    assert available_bytes(proc, groups) == 0


def test_a_container_that_knows_only_its_own_group(tmp_path: Path, proc: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/kubepods/pod1/not-seen-here\n")
    second(tmp_path / "groups", "7000", 3000)
    assert available_bytes(proc, tmp_path / "groups") == 4000


def test_groups_of_version_1(tmp_path: Path, proc: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n")
    write(
        tmp_path / "groups" / "memory" / "docker" / "1",
        memory__limit_in_bytes="6000",
        memory__usage_in_bytes="5000",
        memory__stat="inactive_file 1\ntotal_inactive_file 300\n",
    )
    write(
        tmp_path / "groups" / "memory",
        memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes="5000",
    )
    assert available_bytes(proc, tmp_path / "groups") == 1300
