from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from evald.engines.pin import (
    CHECKSUMS_KEPT,
    Checksums,
    Loading,
    PinFailed,
    PinStage,
    expected_version,
    is_gone,
    new_weight_version,
)
from evald.engines.slots import Slots
from evald.point import PinTarget


def target(step: int = 40) -> PinTarget:
    return PinTarget(run="demo", step=step, digest="0123456789abcdef" * 2, directory=Path("/x"))


def test_weight_version_names_run_step_digest_and_is_never_used_again() -> None:
    versions = {new_weight_version(target()) for _ in range(100)}
    assert len(versions) == 100
    assert all(re.fullmatch(r"demo:40:01234567:[0-9a-f]{8}", version) for version in versions)
    assert new_weight_version(target(-1)).startswith("demo:-1:")


def test_checksum_of_a_digest_must_stay_the_same() -> None:
    checksums = Checksums()
    checksums.check("digest", "aaaa")
    checksums.learn("digest", "aaaa", "engine-0")
    checksums.check("digest", "aaaa")
    checksums.check("other", "bbbb")
    with pytest.raises(PinFailed, match="engine-0 loaded from the same bytes") as caught:
        checksums.check("digest", "bbbb")
    assert caught.value.stage is PinStage.CHECKSUM
    checksums.learn("digest", "bbbb", "engine-1")  # the first one stands
    checksums.check("digest", "aaaa")


def test_old_checksums_are_forgotten() -> None:
    checksums = Checksums()
    for number in range(CHECKSUMS_KEPT + 1):
        checksums.learn(str(number), "aaaa", "engine-0")
        checksums.learn("used", "aaaa", "engine-0")
    checksums.check("0", "bbbb")  # forgotten
    with pytest.raises(PinFailed):
        checksums.check("used", "bbbb")


async def test_a_directory_that_vanished(tmp_path: Path) -> None:
    assert not await is_gone(tmp_path)
    assert await is_gone(tmp_path / "step_1")


async def test_slots_bound_what_is_in_flight() -> None:
    left: list[None] = []
    slots = Slots(4, on_room=lambda: left.append(None))
    assert slots.fits(9)  # larger than the limit: alone
    slots.enter(3)
    assert slots.fits(1)
    assert not slots.fits(2)
    assert not await slots.wait_idle(0.01)
    waiting = asyncio.create_task(slots.wait_idle(5.0))
    await asyncio.sleep(0)
    slots.leave(2)
    assert not waiting.done()
    slots.leave(1)
    assert await waiting
    assert len(left) == 2


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("/dev/shm/evald/step_1", "/mnt/stage/step_1"),
        ("/dev/shm/evald/fast/step_1", "/nvme/step_1"),  # the longest prefix wins
        ("/dev/shm/evald", "/mnt/stage"),
        ("/dev/shm/evald2/step_1", "/dev/shm/evald2/step_1"),  # no part of a name
        ("/other/step_1", "/other/step_1"),
    ],
)
def test_path_map(here: str, there: str) -> None:
    loading = Loading(
        load_format="auto",
        timeout_s=1.0,
        checksums=Checksums(),
        path_map={"/dev/shm/evald": "/mnt/stage", "/dev/shm/evald/fast/": "/nvme"},
    )
    assert loading.path_there(Path(here)) == there


def test_version_that_engines_must_come_to_by_themselves() -> None:
    assert expected_version(target(40)) == "40"
    named = PinTarget(run="r", step=40, digest="d", directory=None, weight_version="v40")
    assert expected_version(named) == "v40"


async def test_weights_in_no_directory_are_not_gone() -> None:
    assert not await is_gone(None)
