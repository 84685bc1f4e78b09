"""How full the staging root is."""

import os
import shutil
from pathlib import Path

from staging_cases import staging

from evald.staging.room import Room


async def test_over_the_budget_there_is_no_room_until_something_is_deleted(tmp_path: Path) -> None:
    room = Room(staging(tmp_path, max_bytes=100))
    for step in range(3):
        (tmp_path / f"step_{step}").mkdir()
        room.count(tmp_path / f"step_{step}", 50)
        assert (await room.shortage() is None) is (step < 2)
    sentence = await room.shortage()
    assert sentence is not None
    assert sentence.startswith("snapshots in the staging root take 150 bytes, over")
    shutil.rmtree(tmp_path / "step_2")  # the next scan has not seen it yet
    assert await room.shortage() is None
    assert room.used_bytes == 100
    room.keep({tmp_path / "step_0"})
    assert room.view(1).used_bytes == 50


async def test_what_must_stay_free_stays_free(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert await Room(staging(tmp_path, min_free_bytes=free // 2)).shortage() is None
    sentence = await Room(staging(tmp_path, min_free_bytes=free * 2)).shortage()
    assert sentence is not None
    assert "under staging.min_free_bytes" in sentence
    assert await Room(staging(tmp_path / "away", min_free_bytes=1)).shortage() is None


def test_before_the_first_scan_the_place_of_the_root_is_asked(tmp_path: Path) -> None:
    """A trainer that asked a daemon that had just started was told of 0 bytes free."""
    assert Room(staging(tmp_path)).view(0).free_bytes > 0
    assert Room(staging(tmp_path / "not" / "yet")).view(0).free_bytes > 0
