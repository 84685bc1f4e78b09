"""Pushing over ssh where something lies already: other bytes, another run, what is no snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from far_host import NearHost
from push_cases import board, carrier, contents, export, hidden, meddling, nothing, visible

from evald.testing import write_snapshot
from evald.trainer.contract import PushError
from evald.trainer.publish import publish
from evald.trainer.push import PushCarrier
from evald.trainer.push import plan as push_plan
from evald.trainer.push.far import StillHeld
from evald.trainer.push.plan import Parcel

pytest_plugins = ["push_places"]


def test_another_export_of_the_step_does_not_go_on_from_the_first(
    near: NearHost, spool: Path, root: Path
) -> None:
    end, pusher = meddling(near, spool, root)

    def cut(_parcel: Parcel) -> None:
        raise PushError("cut off")

    first = export(spool, seed=1)
    end.before_check = cut
    with pytest.raises(PushError, match="cut off"):
        pusher.carry(first)
    (left,) = hidden(root)
    second = export(spool, seed=2)
    end.before_check = nothing
    pusher.carry(second)
    assert contents(root / "step_3") == contents(second)
    assert not left.exists()
    assert hidden(root) == []


def test_a_cut_between_name_and_marker_is_mended(near: NearHost, spool: Path, root: Path) -> None:
    step = export(spool)
    carrier(near, spool, root).carry(step)
    (root / "step_3" / ".complete").unlink()
    inode = (root / "step_3").stat().st_ino
    carrier(near, spool, root).carry(step)
    assert contents(root / "step_3") == contents(step)
    assert (root / "step_3").stat().st_ino == inode


@pytest.mark.parametrize("marked", [True, False])
def test_a_marker_that_is_a_folder(
    near: NearHost, spool: Path, root: Path, *, marked: bool
) -> None:
    step = export(spool)
    carrier(near, spool, root).carry(step)
    marker = root / "step_3" / ".complete"
    marker.unlink()
    (marker / "sub").mkdir(parents=True)
    if marked:
        with pytest.raises(PushError, match="cannot overwrite directory"):
            carrier(near, spool, root).carry(step)
        assert list(marker.iterdir()) == [marker / "sub"]
    else:
        step = export(spool, seed=2)
        carrier(near, spool, root).carry(step)
        assert contents(root / "step_3") == contents(step)
    assert hidden(root) == []


def test_a_hidden_directory_that_is_a_link_is_not_followed(
    near: NearHost, tmp_path: Path, spool: Path, root: Path
) -> None:
    step = export(spool)
    (tmp_path / "elsewhere").mkdir()
    temporary = push_plan.pack(step, "step_3", marker=".complete").temporary
    (root / temporary).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PushError, match="there is a symbolic link, which no push makes; remove it"):
        carrier(near, spool, root).carry(step)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_equal_bytes_of_another_run_get_its_marker(near: NearHost, spool: Path, root: Path) -> None:
    def build(directory: Path) -> None:
        write_snapshot(directory, seed=1, marker=None)

    end, pusher = meddling(near, spool, root)
    pusher.carry(publish(build, spool, 3, run="one"))
    inode = (root / "step_3" / "config.json").stat().st_ino
    sent: list[str] = []
    end.before_send = lambda parcel: sent.append(parcel.name)
    for _ in range(2):
        step = publish(build, spool, 3, run="two")
        pusher.carry(step)
        marker = json.loads((root / "step_3" / ".complete").read_bytes())
        assert (marker["run"], sent) == ("two", [])
    assert (root / "step_3" / "config.json").stat().st_ino == inode


def state(path: Path) -> tuple[int, int, int]:
    """Tell whether a file was written anew; reading it changes nothing of that."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def test_other_bytes_of_a_step_wait_for_its_point(near: NearHost, spool: Path, root: Path) -> None:
    old = export(spool, seed=1)
    end, _ = meddling(near, spool, root)
    pusher = PushCarrier(end, root=spool, busy_timeout_s=2.0)
    pusher.carry(old)
    marked = state(root / "step_3" / ".complete")
    pusher.carry(old)  # equal bytes: nothing happens to them
    assert state(root / "step_3" / ".complete") == marked
    new = export(spool, seed=2)
    board(root, 1, 2, 3)
    with pytest.raises(StillHeld, match=r"push step 3 again: evald has not ended its point") as e:
        pusher.carry(new)
    assert e.value.reason == "busy"
    assert state(root / "step_3" / ".complete") == marked
    board(root, 2, 2)
    names: list[list[str]] = []
    end.before_send = lambda _parcel: names.append(visible(root))
    pusher.carry(new)
    assert names == [[]]  # marker, then directory went before the first byte
    assert contents(root / "step_3") == contents(new)
