"""Logs of living processes stay short."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from evald.engines import log_sizes
from evald.engines.log_sizes import CUT, LogSizes
from evald.engines.process_log import last_words


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_long_log_keeps_its_end_while_its_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sizes, "LOOK_S", 0.01)
    monkeypatch.setattr(log_sizes, "MAX_BYTES", 1000)
    monkeypatch.setattr(log_sizes, "KEEP_BYTES", 100)
    long, short = (tmp_path / "engines" / "engine-0" / name for name in ("0001.log", "0002.log"))
    samples = tmp_path / "samples" / "toy.jsonl"
    for path in (long, short, samples):
        path.parent.mkdir(parents=True, exist_ok=True)
    short.write_text("short\n")
    samples.write_text("x" * 5000)
    clock = Clock()
    logs = LogSizes(tmp_path, clock=clock)
    with long.open("ab", buffering=0) as process:
        for number in range(200):
            process.write(b"line %03d\n" % number)
        watching = asyncio.create_task(logs.run())
        async with asyncio.timeout(30):
            while long.stat().st_size > 1000:
                await asyncio.sleep(0.01)
        process.write(b"and on\n")
        clock.now_s += 1000
        assert "waiting for the next look" in logs.pulse.overdue(60)
        async with asyncio.timeout(30):
            while logs.pulse.overdue(60):
                await asyncio.sleep(0.01)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    lines = long.read_bytes().splitlines(keepends=True)
    assert lines[0] == CUT
    assert lines[1:-1] == [b"line %03d\n" % number for number in range(189, 200)][-len(lines) + 2 :]
    assert len(lines) > 10
    assert last_words(long) == "line 198 | line 199 | and on"
    assert short.read_text() == "short\n"
    assert samples.stat().st_size == 5000


async def test_a_log_that_cannot_be_cut_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sizes, "LOOK_S", 0.01)
    monkeypatch.setattr(log_sizes, "MAX_BYTES", -1)
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "0001.log").mkdir()
    with capture_logs() as logs:
        watching = asyncio.create_task(LogSizes(tmp_path).run())
        async with asyncio.timeout(30):
            while not logs:
                await asyncio.sleep(0.01)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert logs[0]["event"] == "logs_not_shortened"
