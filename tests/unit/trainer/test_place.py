"""Which run unnamed snapshots are of, by where they are put."""

from __future__ import annotations

from pathlib import Path

import pytest

from evald.status.view import StagingView, StatusView
from evald.trainer.dispatcher.place import Place, far_place


def status(root: str | None) -> StatusView:
    staging = StagingView(root=root or "", used_bytes=0, free_bytes=0, snapshots=0)
    return StatusView(
        version="1",
        pid=1,
        beat=1,
        time=0.0,
        uptime_s=0.0,
        state="serving",
        run="daemons",
        results="",
        cap=2,
        staging=staging if root else None,
    )


@pytest.mark.parametrize(
    ("destination", "root", "run"),
    [
        ("node:/dev/shm/evald", "/dev/shm/evald", "daemons"),
        ("me@node:/dev/shm/evald/", "/dev/shm/evald", "daemons"),
        ("[::1]:/dev/shm/evald", "/dev/shm/evald", "daemons"),
        ("node:/dev/shm/evald/night", "/dev/shm/evald", "night"),
        ("node:evald", "/home/me/evald", "daemons"),
        ("node:~/evald/night", "/home/me/evald", "night"),
        ("node:/a/link/to/it", "/dev/shm/evald", None),
        ("node:evald", "/dev/shm/other", None),
        ("node:/dev/shm/evald", None, None),
    ],
)
def test_on_another_host(destination: str, root: str | None, run: str | None) -> None:
    assert far_place(destination).run(status(root)) == run


def test_here(tmp_path: Path) -> None:
    night = tmp_path / "root" / "night"
    (tmp_path / "root" / ".evald").mkdir(parents=True)
    assert Place(tmp_path / "root").run(status("/elsewhere")) == "daemons"
    assert Place(night).run(status("/elsewhere")) == "night"
    (night / ".evald").mkdir(parents=True)  # a root of its own after all
    assert Place(night).run(status("/elsewhere")) == "daemons"


def test_here_in_a_root_that_the_daemon_does_not_own(tmp_path: Path) -> None:
    assert Place(tmp_path).run(status(str(tmp_path))) == "daemons"
    assert Place(tmp_path / "night").run(status(str(tmp_path))) == "night"
    assert Place(tmp_path).run(status("/elsewhere")) is None
    assert Place(None).run(status(str(tmp_path))) is None
