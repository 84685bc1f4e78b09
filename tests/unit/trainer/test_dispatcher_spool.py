"""Another host: everything goes over a spool, in order, and what fails is a skip over there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from dispatch_rig import FakeExporter, Job, Untouchable

from evald.trainer.contract import ExportError, NoSpace
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.links.file_link import FileLink


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class FakeCarrier:
    """Moves things into ``far``; ``faults`` are raised, one a call; None lets it through."""

    def __init__(self, far: Path) -> None:
        self.far = far
        self.faults: list[Exception | None] = []
        self.carried: list[str] = []
        self.discarded: list[str] = []

    def discard(self, path: Path) -> None:
        self.discarded.append(path.name)

    def carry(self, path: Path) -> None:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        self.carried.append(path.name)
        target = self.far / path.name
        if path.is_dir():
            target.mkdir()
            for file in sorted(path.iterdir(), key=lambda file: file.name == ".complete"):
                self._copy(file, target / file.name)
        else:
            self._copy(path, target)

    def _copy(self, source: Path, target: Path) -> None:
        part = target.with_name(f"{target.name}.part")  # the daemon may be looking right now
        part.write_bytes(source.read_bytes())
        part.replace(target)


@pytest.fixture
def carrier(job: Job) -> FakeCarrier:
    return FakeCarrier(job.root)


def far_job(job: Job, carrier: FakeCarrier, tmp_path: Path, **settings: Any) -> EvalDispatcher:
    """Dispatch into a spool; the daemon's root is beyond the carrier."""
    spool = tmp_path / "spool"
    exporter = FakeExporter(spool, run=settings.get("run", "r"))

    def turn() -> None:
        time.sleep(0.002)  # the courier's thread goes by real time
        job.daemon.turn()

    job.clock.on_sleep = turn
    near, job.root = job.root, spool
    try:
        dispatcher = job.dispatcher(
            exporter=exporter,
            carrier=carrier,
            link=FileLink(near, job.results),
            results=None,
            **settings,
        )
    finally:
        job.root = near
    dispatcher._parts.courier._first_pause_s = 0.001  # type: ignore[union-attr]
    return dispatcher


def test_everything_goes_over_the_spool_in_order(
    job: Job, carrier: FakeCarrier, tmp_path: Path
) -> None:
    job.daemon.beat()
    with far_job(job, carrier, tmp_path, run=None, max_in_flight=3) as dispatcher:
        job.daemon.run = "far"
        job.daemon.beat()
        dispatcher.baseline()
        dispatcher.maybe_dispatch(1, "w1")
        dispatcher.finish(2, "w2")
        assert dispatcher.drain(600)
    job.daemon.turn()
    assert carrier.carried == ["baseline.request", "step_1", "step_2", "run.end"]
    assert list((tmp_path / "spool").iterdir()) == []
    assert job.ends() == [(0, 0, "ok"), (1, 0, "ok"), (2, 0, "ok")]


def test_a_snapshot_that_does_not_arrive_is_a_skip_that_does(
    job: Job, carrier: FakeCarrier, tmp_path: Path
) -> None:
    job.daemon.beat()
    dispatcher = far_job(job, carrier, tmp_path, baseline=False)
    carrier.faults += [ExportError("cannot carry step_1: the network is down")] * 3
    carrier.faults += [None, RuntimeError("a bug"), OSError("gone")]
    dispatcher.maybe_dispatch(1, "w1")
    assert dispatcher.drain(600)
    carrier.faults += [NoSpace("cannot carry step_2: the far end is full")]
    dispatcher.maybe_dispatch(2, "w2")
    assert dispatcher.drain(600)
    dispatcher.close(5)
    assert job.ends() == [(1, 0, "export_failed"), (2, 0, "no_space")]
    assert carrier.discarded == ["step_1", "step_2"]
    assert "the network is down" in job.daemon.points()[0].detail
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_is_on_its_way_counts_and_a_later_life_takes_it_over(
    job: Job, carrier: FakeCarrier, tmp_path: Path
) -> None:
    job.daemon.beat()
    held = threading.Event()

    class Held(FakeCarrier):
        def carry(self, path: Path) -> None:
            held.wait(10)
            raise ExportError(f"cannot carry {path.name}: cut")

    first = far_job(job, Held(job.root), tmp_path, max_in_flight=1)
    first.maybe_dispatch(1, "w1")
    skipped = first.maybe_dispatch(2, Untouchable())
    assert skipped.reason == "busy"
    first._parts.courier._closing.set()  # type: ignore[union-attr]
    held.set()
    first.close(0.2)  # the job dies here
    assert {path.name for path in (tmp_path / "spool").iterdir()} == {"step_1", "step_2.skip"}
    second = far_job(job, carrier, tmp_path, max_in_flight=1)
    assert second.resume(1, Untouchable()).action == "known"
    assert second.drain(600)
    second.close(5)
    assert carrier.carried == ["step_1", "step_2.skip"]
    assert sorted(job.ends()) == [(1, 0, "ok"), (2, 0, "busy")]


def test_a_word_that_takes_long_is_waited_for_all_the_same(
    job: Job, carrier: FakeCarrier, tmp_path: Path
) -> None:
    job.daemon.beat()
    dispatcher = far_job(job, carrier, tmp_path, max_in_flight=1)
    began, turn = job.clock.now_s, job.clock.on_sleep
    arrives = threading.Event()

    def slowly(path: Path) -> None:
        arrives.wait(10)
        FakeCarrier.carry(carrier, path)

    def pass_time() -> None:
        if job.clock.now_s > began + 100:
            arrives.set()
        if job.clock.now_s > began + 130:
            turn()
        time.sleep(0.002)
        job.daemon.beat()

    carrier.carry = slowly  # type: ignore[method-assign]
    job.clock.on_sleep = pass_time
    dispatcher.finish(1)
    assert dispatcher.drain(600)
    assert job.ends() == [(1, 0, "ckpt_missing")]
    dispatcher.close(5)


@pytest.mark.parametrize("what", ["snapshot", "word"])
def test_a_host_that_cannot_be_reached_is_not_waited_for(
    job: Job, carrier: FakeCarrier, tmp_path: Path, what: str
) -> None:
    job.daemon.beat()
    dispatcher = far_job(job, carrier, tmp_path, baseline=False)

    def unreachable(path: Path) -> None:
        raise ExportError(f"cannot carry {path.name}: no route")

    carrier.carry = unreachable  # type: ignore[method-assign]
    courier = dispatcher._parts.courier
    assert courier is not None
    courier._first_pause_s = 0.001 if what == "word" else 30.0

    def turn() -> None:  # the daemon lives all the while
        time.sleep(0.002)
        job.daemon.beat()

    job.clock.on_sleep = turn
    if what == "word":
        dispatcher.finish(1)
    else:
        courier._failures = 3  # the network went down before
        dispatcher.maybe_dispatch(1, "w1")
    began = job.clock.now_s
    drained = dispatcher.drain(3600)
    assert job.clock.now_s - began < 60
    assert drained.detail.endswith("and the eval node cannot be reached")
    assert drained.missing == ("step 1",)
    real = time.monotonic()
    dispatcher.close(60)
    assert time.monotonic() - real < 5
    assert list((tmp_path / "spool").iterdir())  # for the job's next life


def test_a_word_that_never_arrives_is_said_to_be_lost(
    job: Job, carrier: FakeCarrier, tmp_path: Path
) -> None:
    job.daemon.beat()
    dispatcher = far_job(job, carrier, tmp_path, baseline=False)
    courier = dispatcher._parts.courier
    assert courier is not None
    courier._first_pause_s = 1e-6
    carrier.faults += [ExportError("cannot carry it: no route")] * 20
    with structlog.testing.capture_logs() as logs:
        dispatcher.finish(1)
        until(lambda: len(courier._waiting) < 2)
        dispatcher.poll()
    (lost,) = [entry for entry in logs if entry["event"] == "word_lost"]
    assert lost["path"].endswith("step_1.skip")
    assert "no route" in lost["detail"]
    dispatcher.close(5)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
