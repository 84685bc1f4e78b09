"""A push over ssh reserves its room in the far root's budget, and lets go of it in any case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from far_host import NearHost
from push_cases import carrier, meddling, visible
from rig import until

from evald.status.view import StagingView, StatusView
from evald.trainer.contract import NoSpace
from evald.trainer.publish import NoRoom, publish
from evald.trainer.publish.reservation import Reservations
from evald.trainer.push.plan import Parcel

pytest_plugins = ["push_places"]
BUDGET = 1_000_000
SIZE = 400_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A staging root on which a daemon with a budget has served."""
    path = tmp_path / "a root's"
    (path / ".evald").mkdir(parents=True)
    staging = StagingView(
        root=str(path), used_bytes=0, free_bytes=1 << 40, snapshots=0, max_bytes=BUDGET
    )
    status = StatusView(
        version="1", pid=1, beat=1, time=0, uptime_s=0, state="serving", run="r", results="", cap=2,
        staging=staging,
    )  # fmt: skip
    (path / ".evald" / "status.json").write_bytes(msgspec.json.encode(status))
    return path


def build(directory: Path) -> None:
    (directory / "weights").write_bytes(os.urandom(SIZE))


def promises(root: Path) -> list[Path]:
    folder = root / ".evald" / "reserved"
    return [path for path in folder.glob("*") if path.name != "lock"]


def test_room_is_reserved_while_a_push_is_under_way(
    near: NearHost, spool: Path, root: Path
) -> None:
    for place in (root, spool):
        (place / "run").mkdir()
    seen: list[int] = []

    def look(_parcel: Parcel) -> None:
        seen.append(Reservations(root).used_bytes())
        with pytest.raises(NoRoom):
            publish(build, root, 3, size_bytes=SIZE)  # a writer on that host
        with pytest.raises(NoSpace, match=r"cannot push step_4 .*: the snapshot takes about 0.4 M"):
            carrier(near, spool, root).carry(publish(build, spool, 4))
        assert not list(root.glob(".push-step_4*"))

    publish(build, root, 1)
    end, pushing = meddling(near, spool / "run", root / "run")
    end.before_check = look
    pushing.carry(publish(build, spool / "run", 2))
    assert len(promises(root)) == 0
    (used,) = seen
    assert 2 * SIZE <= used < 2 * SIZE + 5000
    assert visible(root) == ["run", "step_1"]
    shutil.rmtree(root / "step_1")
    carrier(near, spool, root).carry(spool / "step_4")
    assert visible(root) == ["run", "step_4"]
    with pytest.raises(NoSpace):
        carrier(near, spool, root).carry(publish(build, spool, 5))
    carrier(near, spool, root).carry(publish(build, spool, 6, final=True))
    assert promises(root) == []


def test_the_promise_of_a_killed_push_ends(near: NearHost, spool: Path, root: Path) -> None:
    publish(build, spool, 1)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from evald.trainer.push import carrier_for\n"
        "from evald.trainer.push.rsync import RsyncFar\n"
        "RsyncFar.send = lambda *_, **__: time.sleep(60)\n"
        "carrier_for(sys.argv[1], root=Path(sys.argv[2]), ssh=sys.argv[3:]).carry("
        "Path(sys.argv[2]) / 'step_1')"
    )
    words = [sys.executable, "-c", code, near.destination(root), str(spool), *near.ssh]
    pusher = subprocess.Popen(words)
    until(lambda: promises(root) and Reservations(root).used_bytes() >= SIZE, "it is promised")
    pusher.send_signal(signal.SIGKILL)
    pusher.wait(10)
    until(lambda: Reservations(root).used_bytes() < SIZE, "the promise is worth nothing")
    assert promises(root) == []


def test_where_nothing_can_be_counted_the_push_goes_on(
    near: NearHost, spool: Path, root: Path
) -> None:
    (root / ".evald" / "reserved").write_text("in its place")
    carrier(near, spool, root).carry(publish(build, spool, 1))
    assert visible(root) == ["step_1"]
