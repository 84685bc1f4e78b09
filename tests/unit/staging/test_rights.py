import os
import struct
from pathlib import Path

import pytest
from staging_cases import NOBODY, as_other_user, deep_folders, open_folder, snapshot

from evald.staging import rights
from evald.staging.files import list_files
from evald.staging.rights import deletable, user

ASK = """
print(rights.deletable(Path(sys.argv[1]), with_entry=len(sys.argv) > 2))
"""


def test_what_is_ours_is_deletable(tmp_path: Path) -> None:
    snapshot(tmp_path / "step_1" / "deeper")
    assert deletable(tmp_path) is None
    assert deletable(tmp_path / "step_1", with_entry=True) is None
    assert deletable(tmp_path / "gone", with_entry=True) is None


def test_a_root_that_may_not_be_written() -> None:
    with open_folder() as folder:
        folder.chmod(0o555)
        sentence = as_other_user(ASK, folder)
    assert sentence.startswith(f"cannot delete what is in {folder}: {folder} has mode 0555")
    assert "default ACL on the staging root (setfacl -R -d -m u:" in sentence


def test_a_mode_that_masks_the_acl() -> None:
    owner, named, group, mask, other = 1, 2, 4, 16, 32
    entries = [(owner, 5, -1), (named, 7, NOBODY), (group, 7, -1), (mask, 5, -1), (other, 5, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    with open_folder() as folder:
        os.setxattr(folder, "system.posix_acl_access", acl)
        assert "chmod g+w it, also after each copy" in as_other_user(ASK, folder)
        folder.chmod(0o775)
        assert as_other_user(ASK, folder) == "None"


@pytest.mark.parametrize("closed", ["step_1", "step_1/adapter"])
def test_a_snapshot_that_may_not_be_emptied(closed: str) -> None:
    with open_folder() as folder:
        (folder / "step_1" / "adapter").mkdir(parents=True)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        (folder / closed).chmod(0o500)
        assert f"{folder / closed} has mode 0500" in as_other_user(ASK, folder / "step_1", "entry")
        assert f"{folder / closed} has mode 0500" in as_other_user(ASK, folder)


def test_the_entry_in_the_root_counts_for_a_snapshot() -> None:
    with open_folder() as folder:
        (folder / "step_1").mkdir()
        (folder / "step_1").chmod(0o777)
        folder.chmod(0o555)
        assert as_other_user(ASK, folder / "step_1") == "None"
        assert f"{folder} has mode 0555" in as_other_user(ASK, folder / "step_1", "entry")


def test_unfinished_work_of_the_trainer_is_not_looked_at() -> None:
    with open_folder() as folder:
        (folder / ".tmp-step_1").mkdir(mode=0o700)
        folder.chmod(0o777)
        assert as_other_user(ASK, folder) == "None"


def test_a_sticky_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_1").mkdir()
    tmp_path.chmod(0o1777)
    owner = os.stat(tmp_path).st_uid  # noqa: PTH116 (the patch below leaves it alone)
    monkeypatch.setattr(os, "access", lambda *_, **__: True)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    sentence = deletable(tmp_path / "step_1", with_entry=True)
    assert sentence is not None
    assert f"{tmp_path} is sticky (mode 1777) and step_1 belongs to {user(owner)}" in sentence
    assert f"cannot delete what is in {tmp_path}: {tmp_path} is sticky" in (
        deletable(tmp_path) or ""
    )
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert deletable(tmp_path) is None


def test_ones_own_entry_in_a_sticky_root() -> None:
    is_root = os.geteuid() == 0
    with open_folder() as folder:
        (folder / "step_1").mkdir()
        folder.chmod(0o1777)
        if is_root:
            os.chown(folder / "step_1", NOBODY, NOBODY)
        assert as_other_user(ASK, folder / "step_1", "entry") == "None"
        assert as_other_user(ASK, folder) == "None"
        if is_root:
            (folder / "step_2").mkdir(mode=0o777)
            (folder / "step_2").chmod(0o777)
            assert "step_2 belongs to root" in as_other_user(ASK, folder)


def test_a_read_only_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Disk:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "statvfs", lambda _: Disk)
    assert "is mounted read-only; set staging.owned = false" in (deletable(tmp_path) or "")


def test_users_have_names_or_numbers() -> None:
    assert user(0) == "root (uid 0)"
    assert user(4_000_000) == "uid 4000000"


def test_a_file_that_may_not_be_read_is_told_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "a").touch(mode=0o600)
    (file,) = list_files(tmp_path)
    assert rights.unreadable(file, PermissionError()) == (
        f"cannot read a: its mode is 0600 and its owner {user(os.getuid())}, and evald runs as "
        f"{user(os.getuid())}; the trainer must export with mode 0644 (chmod 0644)"
    )
    assert rights.unreadable(file, OSError(5, "Input/output error")) == (
        "cannot read a: Input/output error"
    )


@pytest.mark.parametrize(("name", "depth"), [("a", 1100), ("a" * 250, 25)])
def test_a_deep_tree_is_no_trap(tmp_path: Path, name: str, depth: int) -> None:
    with deep_folders(tmp_path, name, depth, scratch=tmp_path):
        fault = deletable(tmp_path)
    assert fault is None or "File name too long; delete it by hand" in fault
