"""A file system that fails for a moment costs no snapshot its point."""

import asyncio
import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from staging_cases import MARKER, base_model, snapshot, staging

from evald.errors import InvalidSnapshot, SnapshotGone
from evald.point import EvalPoint
from evald.results.index import PointIndex
from evald.staging import failing, files
from evald.staging.failing import FailingReads, fails_for_now, patiently
from evald.staging.intake import Intake
from evald.staging.offers import InvalidPoint, Offer
from evald.staging.retention import Retention

Failure = Callable[[Path], int | None]


def fail_reads(monkeypatch: pytest.MonkeyPatch, failure: Failure) -> list[Path]:
    """Let opening a file fail with the errno that ``failure`` gives; returns what failed."""
    real, failed = files.open_file, list[Path]()

    def fails(path: Path) -> io.BufferedReader:
        number = failure(path)
        if number is not None:
            failed.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    for module in ("manifest", "safetensors_header", "digest", "validate"):
        monkeypatch.setattr(f"evald.staging.{module}.open_file", fails)
    return failed


async def first_offer(root: Path, enough: Callable[[], bool]) -> Offer:
    """Return what the intake offers first; ``enough`` is true by then."""
    config = staging(root, scan_interval_s=0.05)
    offers: asyncio.Queue[Offer] = asyncio.Queue()
    intake = Intake(
        config,
        run="r",
        base=base_model(),
        index=PointIndex(),
        retention=Retention(config),
        offer=offers.put,
    )
    watching = asyncio.create_task(intake.run())
    try:
        async with asyncio.timeout(20):
            offer = await offers.get()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    assert enough()
    return offer


@pytest.mark.parametrize("name", [MARKER, "model.safetensors"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
async def test_a_read_that_fails_twice_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    snapshot(tmp_path / "step_1", manifest={"run": "named"})
    failed: list[Path] = []

    def failure(path: Path) -> int | None:
        return number if path.name == name and len(failed) < 2 else None

    failed = fail_reads(monkeypatch, failure)
    offer = await first_offer(tmp_path, lambda: len(failed) == 2)
    assert isinstance(offer, EvalPoint)
    assert offer.key.run == "named"


async def test_a_read_that_goes_on_failing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "_SECONDS", 0.5)
    snapshot(tmp_path / "step_1")
    began = time.monotonic()

    def failure(path: Path) -> int | None:
        return errno.EIO if path.name == "model.safetensors" else None

    failed = fail_reads(monkeypatch, failure)
    offer = await first_offer(tmp_path, lambda: len(failed) >= 3)
    assert time.monotonic() - began >= 0.5
    assert isinstance(offer, InvalidPoint)
    assert "cannot read model.safetensors: Input/output error" in offer.detail


async def test_what_the_file_system_says_of_the_file_itself_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(tmp_path / "step_1")

    def failure(path: Path) -> int | None:
        return errno.ELOOP if path.name == "model.safetensors" else None

    failed = fail_reads(monkeypatch, failure)
    offer = await first_offer(tmp_path, lambda: len(failed) == 1)
    assert isinstance(offer, InvalidPoint)


def test_enough_looks_over_enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = FailingReads()
    here, there = Path("/here"), Path("/there")
    assert [reads.is_lasting(here, "fault") for _ in range(5)] == [False] * 5
    monkeypatch.setattr(failing, "_SECONDS", 0.0)
    assert reads.is_lasting(here, "fault")
    assert [reads.is_lasting(there, "fault") for _ in range(3)] == [False, False, True]
    reads.forget(there)
    assert not reads.is_lasting(there, "fault")


async def test_a_point_waits_for_its_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failing, "_PAUSES_S", (0.01, 0.01))
    tries = 0

    async def read(good_after: int, fault: type[Exception], cause: Exception) -> int:
        nonlocal tries
        tries += 1
        if tries <= good_after:
            raise fault("cannot read it") from cause
        return tries

    io_error: Any = OSError(errno.EIO, "Input/output error")
    assert await patiently(lambda: read(2, InvalidSnapshot, io_error)) == 3
    tries = 0
    with pytest.raises(SnapshotGone):
        await patiently(lambda: read(9, SnapshotGone, io_error))
    assert tries == 3
    tries = 0
    with pytest.raises(InvalidSnapshot):
        await patiently(lambda: read(9, InvalidSnapshot, FileNotFoundError(2, "no such file")))
    assert tries == 1
    assert not fails_for_now(InvalidSnapshot("it is wrong"))
