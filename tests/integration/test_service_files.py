"""What systemd itself says of the files that ship in systemd/, and of the README's lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from real_systemd import UNITS, install_lines

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)
UNIT = (UNITS / "evald.service").read_text()


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with a program that is there."""
    unit = tmp_path / "evald.service"
    unit.write_text(UNIT.replace("/opt/evald/venv/bin/evald", "/bin/true"))
    return unit


def drop_in() -> str:
    """The example with everything in it uncommented."""
    lines = (UNITS / "evald.service.d/paths.conf.example").read_text().splitlines()
    return "\n".join(line.removeprefix("#") for line in lines if not line.startswith("# "))


def test_systemd_has_nothing_to_say(unit: Path) -> None:
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nor_to_the_drop_in_when_all_of_it_is_used(unit: Path) -> None:
    directory = unit.with_name("evald.service.d")
    directory.mkdir()
    text = drop_in().replace("/opt/evald/venv/bin/evald", "/bin/true")
    assert text.count("\n[") == 2 - text.startswith("[")
    assert "ReadWritePaths=/results /scratch/evald" in text
    (directory / "paths.conf").write_text(text)
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_hardened(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(unit))
    exposure = re.search(r"Overall exposure level for evald.service: ([\d.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= 2.5


@pytest.mark.parametrize(
    "never", ["PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "RemoveIPC", "DynamicUser"]
)
def test_what_gpus_or_snapshots_would_not_survive_is_not_in_it(never: str) -> None:
    assert not re.search(rf"^{never}=", UNIT, re.MULTILINE)


def test_users_and_directories_are_made(tmp_path: Path) -> None:
    root = f"--root={tmp_path}"
    (tmp_path / "etc").mkdir()
    for command in (
        ["systemd-sysusers", root, str(UNITS / "evald.sysusers.conf")],
        # (the names in an ACL are looked up outside that root: the machine's test has them)
        ["systemd-tmpfiles", root, "--create", str(UNITS / "evald.tmpfiles.conf")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    (user,) = [x for x in (tmp_path / "etc/passwd").read_text().splitlines() if "evald" in x]
    _, _, uid, _, _, home, shell = user.split(":")
    assert int(uid) < 1000  # a user of the system, whom logind's RemoveIPC spares
    assert (home, shell) == ("/var/lib/evald", "/usr/sbin/nologin")
    assert (tmp_path / "dev/shm/evald").stat().st_mode & 0o7777 == 0o2770
    assert (tmp_path / "etc/evald").is_dir()
    assert (tmp_path / "var/lib/evald").is_dir()


def test_the_readme_installs_each_file_where_systemd_looks() -> None:
    places = dict(re.findall(r"install -D -m644 systemd/(\S+) (\S+)", "\n".join(install_lines())))
    assert places == {
        "evald.service": "/etc/systemd/system/evald.service",
        "evald.sysusers.conf": "/etc/sysusers.d/evald.conf",
        "evald.tmpfiles.conf": "/etc/tmpfiles.d/evald.conf",
    }
