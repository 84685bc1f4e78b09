"""Regrading as the daemon does it: one at a time, in the background, with its progress shown."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from evaluator_world import until
from regrade_world import RUN, RegradeWorld, correct, rows

from evald.config import EvalSet
from evald.evals.graders import Grade, Rules, Sample
from evald.evals.grading import Grading
from evald.regrade import service as service_module
from evald.regrade.plan import CannotRegrade, What
from evald.regrade.service import RegradeService, carry_out
from evald.status.view import RegradeView


@pytest.fixture
def world(tmp_path: Path, make_model: Any) -> Iterator[RegradeWorld]:
    made = RegradeWorld(tmp_path, make_model())
    yield made
    made.ledger.close()


@pytest.fixture
def toy(make_set: Any) -> EvalSet:
    one: EvalSet = make_set(rows(3), grader="boxed_exact")
    return one


@asynccontextmanager
async def running(world: RegradeWorld, sets: list[EvalSet]) -> AsyncIterator[RegradeService]:
    service = RegradeService(lambda: world.regrader(sets))
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_one_regrade_at_a_time(
    world: RegradeWorld, toy: EvalSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.measure(1, [toy], correct)
    gate = asyncio.Event()

    async def slow(_self: Grading, _rules: Rules, sample: Sample, *, timeout_s: float) -> Grade:
        assert timeout_s > 0
        before.append(service.pulse.overdue(1e9))
        if sample.question != "1":
            await gate.wait()
        return Grade(0.5)

    before: list[str] = []
    monkeypatch.setattr(Grading, "grade", slow)
    monkeypatch.setattr(service_module, "_LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(service_module, "_SLACK_S", -1e9)
    async with running(world, [toy]) as service:
        assert service.pulse.overdue(0) == ""
        said = await service.start(What(run=RUN), "t1")
        assert said == "1 point of run 'r' will be graded again"
        (view,) = service.views()
        await until(lambda: view.samples_done == 1)
        assert (view.ticket, view.state, view.points, view.samples) == ("t1", "running", 1, 3)
        assert all(late.startswith("regrade: 'grading' since") for late in before)
        assert service.pulse.overdue(1e9).startswith("regrade: 'grading' since")
        with pytest.raises(CannotRegrade, match="another regrade is running"):
            await service.start(What(run=RUN), "t2")
        gate.set()
        await until(lambda: view.state == "done")
        assert view.said == ["r:step:1.r1 is ok: toy 1.0000 -> 0.5000"]
        assert (view.points_done, view.n_said) == (1, 1)
        await service.start(What(run=RUN, steps=[1]), "t3")
        await until(lambda: service.views()[-1].state == "done")
        assert [one.ticket for one in service.views()] == ["t1", "t3"]
        await until(lambda: not service.pulse.overdue(0))


async def test_each_point_and_each_sample_is_progress(world: RegradeWorld, toy: EvalSet) -> None:
    await world.measure(1, [toy], correct)
    regrader = world.regrader([toy])
    marks: list[int] = []
    view = RegradeView(ticket="t", run=RUN, points=1)
    try:
        plan = await regrader.plan(What(run=RUN))
        mark = functools.partial(marks.append, 1)
        await carry_out(regrader, plan, view, say=lambda _: None, mark=mark)
    finally:
        await regrader.close()
    assert len(marks) == 1 + view.samples == 4


async def test_a_point_that_cannot_be_graded_again_does_not_keep_the_others_from_it(
    world: RegradeWorld, toy: EvalSet
) -> None:
    for step in (1, 2, 3):
        await world.measure(step, [toy], correct)
    samples = Path(world.results.dir) / "samples/r"
    (samples / "step_1.r0/toy.jsonl").unlink()
    (samples / "step_2.r0/toy.jsonl").write_text("")
    async with running(world, [toy]) as service:
        await service.start(What(run=RUN), "t")
        (view,) = service.views()
        await until(lambda: view.state == "failed")
    missing, lost, done = view.said
    assert "step_1.r0/toy.jsonl are gone" in missing
    assert "has 0 of its samples, but 3 had an answer" in lost
    assert done == "r:step:3.r1 is ok: toy 1.0000 -> 1.0000"
    # what cannot be planned at all is said at once, and leaves room for the next one
    async with running(world, [toy]) as service:
        for _ in range(2):
            with pytest.raises(CannotRegrade, match="are gone"):
                await service.start(What(run=RUN, steps=[1]), "t")
        assert service.views() == []


async def test_a_ledger_that_fails_ends_a_regrade(world: RegradeWorld, toy: EvalSet) -> None:
    for step in (1, 2):
        await world.measure(step, [toy], correct)
    async with running(world, [toy]) as service:
        await service.start(What(run=RUN), "t")
        world.ledger.close()
        (view,) = service.views()
        await until(lambda: view.state == "failed")
    assert (view.points_done, view.n_said) == (0, 1)
    assert "the ledger is closed" in view.said[0]
