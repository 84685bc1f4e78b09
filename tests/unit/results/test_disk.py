from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from evald.config import Results
from evald.results import disk as disk_module
from evald.results.disk import Disk
from evald.results.index import PointIndex
from evald.results.sample_store import SampleStore


def store(directory: Path) -> SampleStore:
    config = Results(dir=str(directory))
    return SampleStore(config, index=PointIndex(), is_open=lambda _: False)


async def look_at(disk: Disk) -> None:
    task = asyncio.create_task(disk.run())
    async with asyncio.timeout(30):
        while disk.view() is None:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait((task,))


async def test_room_and_samples_are_shown_once_they_are_known(tmp_path: Path) -> None:
    samples = store(tmp_path)
    disk = Disk(tmp_path, samples)
    assert disk.view() is None
    await look_at(disk)
    view = disk.view()
    assert view is not None
    status = os.statvfs(tmp_path)
    assert view.results_total_bytes == status.f_blocks * status.f_frsize
    assert 0 < view.results_free_bytes <= view.results_total_bytes
    assert view.samples_bytes is None
    await samples.look()
    view = disk.view()
    assert view is not None
    assert view.samples_bytes == 0


async def test_a_disk_that_hangs_is_a_loop_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(disk_module, "_room", lambda _: hangs.wait(60) and None)
    monkeypatch.setattr(disk_module, "_STATVFS_S", -disk_module.LOOK_S)
    disk = Disk(tmp_path, store(tmp_path))
    assert disk.pulse.overdue(0) == ""
    task = asyncio.create_task(disk.run())
    async with asyncio.timeout(30):
        while not disk.pulse.overdue(60):
            await asyncio.sleep(0.001)
    assert disk.pulse.overdue(60).startswith("disk: 'looking")
    hangs.set()
    task.cancel()
    await asyncio.wait((task,))
