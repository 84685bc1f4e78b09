"""One daemon for each owned root."""

import os
from pathlib import Path

import pytest
from staging_cases import as_other_user, open_folder
from structlog.testing import capture_logs

from evald.errors import EvaldError
from evald.staging.root_lock import RootLock


def test_a_second_one_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first, second = RootLock(tmp_path), RootLock(tmp_path)
    first.take()
    with pytest.raises(EvaldError, match=rf"another evald \(pid {os.getpid()}\) deletes"):
        second.take()
    first.close()
    second.take()
    second.close()
    second.close()


@pytest.mark.parametrize("in_the_way", ["file", "link", "pipe"])
def test_a_lock_that_cannot_be_is_told_and_stops_nobody(tmp_path: Path, in_the_way: str) -> None:
    if in_the_way == "file":
        (tmp_path / ".evald").touch()
    else:
        (tmp_path / ".evald").mkdir()
        lock = tmp_path / ".evald" / "lock"
        os.mkfifo(lock) if in_the_way == "pipe" else lock.symlink_to("/etc/passwd")
    with capture_logs() as logs:
        RootLock(tmp_path).take()
    assert [entry["event"] for entry in logs] == ["staging_root_not_locked"]


def test_a_root_that_may_not_be_written_is_told() -> None:
    with open_folder() as folder:
        folder.chmod(0o755)
        printed = as_other_user(
            "from evald.staging.root_lock import RootLock; RootLock(Path(sys.argv[1])).take()",
            folder,
        )
    assert "staging_root_not_locked" in printed
