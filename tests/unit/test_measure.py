"""What becomes of a point when no engine is left, or when its digest takes long."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from evald import measure as measure_module
from evald.config import Dispatch
from evald.errors import Unhealthy
from evald.judge import judge
from evald.measure import Measure
from evald.point import EvalPoint, PointKey, Snapshot, Timings
from evald.postures.contract import PointResult, SetResult
from evald.results.records import Counts, PointRecord
from evald.staging.digest import fingerprint
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


def measure_of(posture: NoEngineLeft) -> Measure:
    parts: dict[str, Any] = {"posture": posture}
    return Measure(Dispatch(), marker=".complete", **parts)


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
    async with asyncio.timeout(2):
        record = await start(measure_of(NoEngineLeft(*states)), directory, digest="d")
    assert record.reason == "unhealthy"


async def test_close_ends_a_digest_that_takes_long(tmp_path: Path) -> None:
    directory = write_snapshot(tmp_path / "step_1")
    with (directory / "large.bin").open("wb") as file:
        file.truncate(1 << 42)  # sparse: it takes no room, and minutes to read
    measure = measure_of(NoEngineLeft())
    point = start(measure, directory)
    await asyncio.wait({point}, timeout=0.3)
    assert not point.done()
    point.cancel()
    measure.close()
    async with asyncio.timeout(5):  # the thread is at its end, too
        await asyncio.get_running_loop().shutdown_default_executor()
    assert point.done()


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
