"""What a person is told of the staging root before anything starts."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from staging_cases import as_other_user, open_folder

from evald.config import BlackBox, Config, Results, Staging
from evald.point import Kind, Outcome, Timings
from evald.results.records import Accepted, AnyRecord, PointRecord
from evald.staging_notes import Machine, staging_notes
from evald.text import encode_json


def config(root: Path, results: Path = Path("/none"), **staging: Any) -> Config:
    return Config(
        run="r",
        staging=Staging(root=str(root), **staging),
        results=Results(dir=str(results)),
        blackbox=BlackBox(command=["true"]),
    )


def machine(path: Path, **logind: str) -> Machine:
    for name, text in logind.items():
        file = path / name.replace("__", "/").replace("_conf", ".conf")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    folders = tuple(path / name for name in ("usr", "run", "etc"))
    return Machine(shared_memory=path / "shm", systemd=path, logind=folders)


def warnings(*arguments: Any) -> list[str]:
    return [note for note in staging_notes(*arguments) if note.startswith("WARNING")]


@pytest.mark.parametrize(
    ("logind", "is_told"),
    [
        ({}, True),
        ({"etc__logind_conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc__logind_conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({"etc__logind_conf": "RemoveIPC=no", "run__logind.conf.d__a_conf": "RemoveIPC=1"}, True),
        ({"usr__logind_conf": "RemoveIPC=no"}, False),
        ({"usr__logind_conf": "RemoveIPC=no", "etc__logind_conf": "RemoveIPC = on"}, True),
        (
            {
                "usr__logind.conf.d__z_conf": "RemoveIPC=yes",
                "etc__logind.conf.d__z_conf": "RemoveIPC=off",
            },
            False,
        ),
    ],
)
def test_logind_that_empties_the_root_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logind: dict[str, str], is_told: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    told = warnings(config(tmp_path / "shm" / "evald"), None, machine(tmp_path, **logind))
    assert [("RemoveIPC=no in" in note) for note in told] == [True] * is_told


def test_logind_spares_system_users_and_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 999)
    assert warnings(config(tmp_path / "shm" / "evald"), None, here) == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert warnings(config(tmp_path / "disk"), None, here) == []


def test_a_containers_shared_memory_is_told(tmp_path: Path) -> None:
    """Real tmpfs: of a container's default size, and a larger one."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    shm = tmp_path / "shm"
    shm.mkdir()
    for size, is_told in (("65536k", True), ("65600k", False)):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(shm)]
        mounted = subprocess.run(mount, check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip(f"this machine mounts nothing: {mounted.stderr.decode()}")
        try:
            told = warnings(config(shm / "evald"), None, machine(tmp_path))
        finally:
            subprocess.run(["umount", shm], check=True)
        assert [("has 64 MiB, which is a container's default" in n) for n in told] == [
            True
        ] * is_told


def test_too_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = config(tmp_path / "root" / "not-yet", keep=1, min_free_bytes=50)  # 1 + 2 + 1 snapshots
    for total, free, words in (
        (449, 449, "in all, less than that peak"),
        (1000, 449, "free, less than that peak"),
        (450, 450, None),
    ):
        disk = shutil.disk_usage("/")._replace(total=total, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, disk=disk: disk)
        told = warnings(one, 100, machine(tmp_path))
        assert [words in note for note in told if words] == [True] * (words is not None)


def test_a_directory_of_another_user_is_told() -> None:
    with open_folder() as folder:
        (folder / "root" / "step_1").mkdir(parents=True)
        (folder / "root").chmod(0o777)
        (folder / "root" / "step_1" / "file").touch()
        if os.geteuid() != 0:
            (folder / "root" / "step_1").chmod(0o555)
        printed = as_other_user(
            """
Machine = staging_notes.Machine
root = Staging(root=sys.argv[1])
one = Config(staging=root, results=Results(dir="/none"), blackbox=BlackBox(command=["true"]))
print(*staging_notes.staging_notes(one, None, Machine()), sep="\\n")
""",
            folder / "root",
        )
    assert printed.startswith(f"WARNING: cannot delete what is in {folder}/root")
    assert "setfacl -R -d -m" in printed


def ledger(directory: Path, *, point_s: float, gap_s: float, points: int, overlap_s: float) -> Path:
    """Write the records of points that begin so long before the one before them has ended."""
    records: list[AnyRecord] = []
    began_s = -point_s
    for step in range(points):
        began_s = max(step * gap_s, began_s + point_s - overlap_s)
        fields: dict[str, Any] = {"run": "r", "step": step, "time": step * gap_s}
        records.append(
            Accepted(record_id=f"a{step}", directory="", size_bytes=1, fingerprint="", **fields)
        )
        timings = Timings(pin_s=1.0, evaluate_s=point_s - 1, queued_s=1e6)
        ended: dict[str, Any] = {**fields, "time": began_s + point_s}
        point = PointRecord(record_id=f"p{step}", outcome=Outcome.OK, timings=timings, **ended)
        records.append(point)
        records.append(
            PointRecord(
                record_id=f"b{step}",
                kind=Kind.BASELINE,
                outcome=Outcome.OK,
                timings=Timings(evaluate_s=1e6),
                **fields,
            )
        )
    directory.mkdir()
    lines = []
    for seq, record in enumerate(records, start=1):
        record.seq = seq
        lines.append(encode_json(record) + b"\n")
    (directory / "results.jsonl").write_bytes(b"".join(lines))
    return directory


@pytest.mark.parametrize(
    ("point_s", "overlap_s", "gap_s", "points", "is_told"),
    [
        (90.0, 0.0, 60.0, 10, True),
        (140.0, 50.0, 60.0, 10, True),
        (100.0, 50.0, 60.0, 10, False),
        (60.0, 0.0, 60.0, 10, False),
        (30.0, 0.0, 60.0, 10, False),
        (90.0, 0.0, 60.0, 4, False),
    ],
)
def test_a_cadence_that_the_sets_cannot_keep_up_with_is_told(
    tmp_path: Path, point_s: float, overlap_s: float, gap_s: float, points: int, is_told: bool
) -> None:
    results = ledger(
        tmp_path / "results", point_s=point_s, gap_s=gap_s, points=points, overlap_s=overlap_s
    )
    told = warnings(config(tmp_path / "root", results), None, machine(tmp_path))
    assert len(told) == is_told
    if is_told:
        assert "takes the engines for 90 s, and one came every 60 s" in told[0]
        assert "evaluate every 1.5 times as many steps" in told[0]
