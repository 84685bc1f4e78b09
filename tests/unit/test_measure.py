"""What becomes of a point when no engine is left, or when its digest takes long."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from evald import measure as measure_module
from evald.config import Dispatch, Results
from evald.errors import EvaldError, InvalidSnapshot, SnapshotGone, Unhealthy
from evald.judge import judge
from evald.measure import Measure
from evald.point import EvalPoint, PointKey, Snapshot, Timings
from evald.postures.contract import PointResult, SetResult
from evald.results import time_used as time_used_module
from evald.results.index import PointIndex
from evald.results.pause import Pause
from evald.results.records import Accepted, Counts, PointRecord
from evald.results.time_used import TimeUsed
from evald.staging import failing
from evald.staging.digest import content_digest, fingerprint
from evald.status.view import EngineView
from evald.testing import write_snapshot


class NoEngineLeft:
    """A posture whose pins fail."""

    def __init__(self, *states: str) -> None:
        self.states = states

    def engines(self) -> list[EngineView]:
        return [EngineView(name="e", state=state) for state in self.states]

    async def prepare(self, point: EvalPoint) -> EvalPoint:
        return point

    async def measure(self, point: EvalPoint, prepared: EvalPoint, **_: Any) -> PointResult:
        raise Unhealthy(f"cannot pin {point.key}: no engine is left for {prepared.key}")


def measure_of(
    posture: NoEngineLeft, limits: Dispatch | None = None, time_used: TimeUsed | None = None
) -> Measure:
    parts: dict[str, Any] = {"posture": posture, "time_used": time_used}
    return Measure(limits or Dispatch(), marker=".complete", **parts)


def start(measure: Measure, directory: Path, **fields: Any) -> asyncio.Task[PointRecord]:
    seen, size_bytes = fingerprint(directory, ".complete")
    snapshot = Snapshot(
        run="r", step=1, directory=directory, fingerprint=seen, size_bytes=size_bytes, **fields
    )
    turn = asyncio.Event()
    turn.set()
    point = EvalPoint(PointKey("r", 1), snapshot)
    work = measure.run(
        point,
        queued_s=0.0,
        turn=turn,
        on_spare=lambda: None,
        on_state=lambda _: None,
        on_set=lambda _: asyncio.sleep(0),
    )
    return asyncio.create_task(work)


async def test_a_daemon_that_loses_all_engines_writes_no_terminal_record(tmp_path: Path) -> None:
    directory = write_snapshot(tmp_path / "step_1")
    point = start(measure_of(NoEngineLeft("quarantined", "quarantined")), directory, digest="d")
    await asyncio.wait({point}, timeout=0.3)
    point.cancel()  # as the end of the engines' task does
    with pytest.raises(asyncio.CancelledError):
        await point


async def test_a_stop_that_does_not_come_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "_STOP_COMES_S", 0.01)
    directory = write_snapshot(tmp_path / "step_1")
    record = await start(measure_of(NoEngineLeft("quarantined")), directory, digest="d")
    assert record.reason == "unhealthy"


@pytest.mark.parametrize("states", [("quarantined", "starting"), ()])
async def test_an_unhealthy_fleet_ends_the_point(tmp_path: Path, states: tuple[str, ...]) -> None:
    directory = write_snapshot(tmp_path / "step_1")
    async with asyncio.timeout(20):
        record = await start(measure_of(NoEngineLeft(*states)), directory, digest="d")
    assert record.reason == "unhealthy"


def endless_snapshot(directory: Path) -> Path:
    """Write a snapshot that takes no room, and minutes to hash."""
    write_snapshot(directory)
    with (directory / "large.bin").open("wb") as file:
        file.truncate(1 << 42)  # sparse
    return directory


class Preparing(NoEngineLeft):
    """A posture that prepares for as long as ``work`` takes."""

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._work = work
        self.cancelled = False

    async def prepare(self, point: EvalPoint) -> EvalPoint:
        try:
            await self._work()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return point


async def test_a_point_that_is_cancelled_ends_a_digest_that_takes_long(tmp_path: Path) -> None:
    point = start(measure_of(NoEngineLeft()), endless_snapshot(tmp_path / "step_1"))
    await asyncio.wait({point}, timeout=0.3)
    assert not point.done()
    point.cancel()
    with pytest.raises(asyncio.CancelledError):
        await point
    async with asyncio.timeout(20):  # the thread is at its end, too
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_snapshot_is_prepared_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepares, hashes = threading.Event(), threading.Event()

    def content_digest(*_: Any, **__: Any) -> str:
        hashes.set()
        assert prepares.wait(20)
        return "d"

    async def work() -> None:
        prepares.set()
        assert await asyncio.to_thread(hashes.wait, 20)

    monkeypatch.setattr(measure_module, "content_digest", content_digest)
    record = await start(measure_of(Preparing(work)), write_snapshot(tmp_path / "step_1"))
    assert (record.reason, record.digest) == ("unhealthy", "d")


async def test_a_snapshot_that_cannot_be_hashed_is_prepared_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content_digest(*_: Any, **__: Any) -> str:
        raise InvalidSnapshot("cannot read model.safetensors")

    monkeypatch.setattr(measure_module, "content_digest", content_digest)
    posture = Preparing(asyncio.Event().wait)
    async with asyncio.timeout(20):
        record = await start(measure_of(posture), write_snapshot(tmp_path / "step_1"))
    assert (record.reason, record.detail) == ("invalid_snapshot", "cannot read model.safetensors")
    assert posture.cancelled


async def test_a_snapshot_that_cannot_be_prepared_is_hashed_no_further(tmp_path: Path) -> None:
    async def work() -> None:
        await asyncio.sleep(0.1)  # (the digest is under way)
        raise InvalidSnapshot("cannot read tokenizer.json")

    async with asyncio.timeout(20):
        record = await start(measure_of(Preparing(work)), endless_snapshot(tmp_path / "step_1"))
        assert record.detail == "cannot read tokenizer.json"
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_checkpoint_that_its_trainer_deletes_is_missing_not_rewritten(
    tmp_path: Path,
) -> None:
    directory = write_snapshot(tmp_path / "step_1")
    point = start(measure_of(NoEngineLeft("serving")), directory, digest="d", owned=False)
    (directory / "model.safetensors").unlink()
    asyncio.get_running_loop().call_later(0.3, shutil.rmtree, directory)
    record = await point
    assert record.reason == "ckpt_missing"
    assert record.detail.endswith("let the trainer keep more checkpoints, or save fewer")


async def test_a_checkpoint_that_its_trainer_overwrites_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "_VANISH_S", 0.2)
    directory = write_snapshot(tmp_path / "step_1")
    point = start(measure_of(NoEngineLeft("serving")), directory, digest="d", owned=False)
    (directory / "model.safetensors").unlink()
    assert (await point).reason == "superseded"


class Measured(NoEngineLeft):
    """A posture with one set, of which one sample of three has no score."""

    def __init__(self, *, too_few: bool) -> None:
        super().__init__("serving")
        self.too_few = too_few

    async def measure(self, point: EvalPoint, prepared: EvalPoint, **fields: Any) -> PointResult:
        assert point is prepared
        counts = Counts(n_total=300, n_scored=299, n_error=1)
        one = SetResult(name="math", counts=counts, seconds=1.0, metrics={}, too_few=self.too_few)
        await fields["stages"].set_done(one)
        return PointResult(
            counts=counts,
            metrics={},
            engines=[],
            weight_versions=[],
            provenance={},
            curve_breaks=["math"],
        )


@pytest.mark.parametrize("too_few", [False, True])
async def test_a_set_with_too_few_scores_makes_the_point_partial(
    tmp_path: Path, too_few: bool
) -> None:
    directory = write_snapshot(tmp_path / "step_1")
    record = await start(measure_of(Measured(too_few=too_few)), directory, digest="d")
    assert record.outcome == ("partial" if too_few else "ok")
    assert ("fewer than min_eval_samples: math" in record.detail) is too_few
    assert record.curve_breaks == ["math"]


@pytest.mark.parametrize(
    ("n_cut", "outcome"), [(0, "ok"), (1, "partial"), (60, "partial"), (61, "skipped")]
)
async def test_a_point_that_was_cut_is_partial_or_too_little(
    tmp_path: Path, n_cut: int, outcome: str
) -> None:
    snapshot = Snapshot(run="r", step=1, directory=tmp_path, fingerprint="f", size_bytes=1)
    counts = Counts(n_total=300, n_scored=300 - n_cut, n_timeout=n_cut, n_cut=n_cut)
    record = judge(
        EvalPoint(PointKey("r", 1), snapshot),
        PointResult(counts=counts, metrics={}, engines=[], weight_versions=[], provenance={}),
        digest="d",
        timings=Timings(),
        sets=[SetResult(name="math", counts=counts, seconds=1.0, metrics={})],
        limits=Dispatch(min_done_share=0.8),
    )
    assert record.outcome == outcome
    assert record.reason == ("deadline" if outcome == "skipped" else "")


async def test_exactly_the_least_share_is_enough(tmp_path: Path) -> None:
    snapshot = Snapshot(run="r", step=1, directory=tmp_path, fingerprint="f", size_bytes=1)
    counts = Counts(n_total=100, n_scored=7, n_timeout=93, n_cut=93)
    record = judge(
        EvalPoint(PointKey("r", 1), snapshot),
        PointResult(counts=counts, metrics={}, engines=[], weight_versions=[], provenance={}),
        digest="d",
        timings=Timings(),
        sets=[SetResult(name="math", counts=counts, seconds=1.0, metrics={})],
        limits=Dispatch(min_done_share=0.07),
    )
    assert record.outcome == "partial"


async def test_a_file_system_that_fails_once_costs_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "_PAUSES_S", (0.01, 0.01))
    real_digest, real_look, failures = content_digest, fingerprint, [1, 1]

    def fail_once(which: int, kind: type[EvaldError]) -> None:
        if failures[which]:
            failures[which] -= 1
            raise kind("cannot read it") from OSError(errno.EIO, "Input/output error")

    def digest(*args: Any, **kwargs: Any) -> str:
        fail_once(0, InvalidSnapshot)
        return real_digest(*args, **kwargs)

    def look(*args: Any) -> tuple[str, int]:
        fail_once(1, SnapshotGone)
        return real_look(*args)

    directory = write_snapshot(tmp_path / "step_1")
    point = start(measure_of(Measured(too_few=False)), directory)
    monkeypatch.setattr(measure_module, "content_digest", digest)
    monkeypatch.setattr(measure_module, "fingerprint", look)
    assert (await point).outcome == "ok"
    assert failures == [0, 0]


class Killed(NoEngineLeft):
    """A posture under which the daemon is killed after ``life_s`` of each point."""

    def __init__(self, life_s: float) -> None:
        super().__init__("serving")
        self.life_s = life_s
        #: what was left of the deadline in each life.
        self.left_s: list[float] = []

    async def measure(self, point: EvalPoint, prepared: EvalPoint, **fields: Any) -> PointResult:
        assert point is prepared
        self.left_s.append(fields["deadline"] - asyncio.get_running_loop().time())
        fields["stages"].set_begins("math")
        await asyncio.sleep(self.life_s)
        raise asyncio.CancelledError


async def test_a_deadline_is_of_all_lives_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_used_module, "INTERVAL_S", 0.05)
    directory = write_snapshot(tmp_path / "step_1")
    index, posture = PointIndex(), Killed(0.4)
    index.apply(
        Accepted(
            run="r",
            step=1,
            record_id="r/step/1/r0/accepted",
            directory=str(directory),
            size_bytes=1,
            fingerprint="f",
        )
    )
    limits = Dispatch(point_deadline_s=0.6)
    record = None
    for _ in range(6):
        times = TimeUsed(Results(dir=str(tmp_path)), index=index, pause=Pause())
        life = start(measure_of(posture, limits, times), directory, digest="d")
        await asyncio.wait([life], timeout=20)
        if not life.cancelled():
            record = life.result()
            break
    assert posture.left_s[0] == pytest.approx(0.6, abs=0.1)
    assert posture.left_s[1] == pytest.approx(0.2, abs=0.15)
    assert all(left_s < 0.01 for left_s in posture.left_s[2:])
    assert record is not None
    assert record.reason == "deadline"
    assert "in earlier lives of the daemon" in record.detail
