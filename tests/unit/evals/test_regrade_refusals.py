"""What cannot be graded again says why, and what is cut short leaves no half of a revision."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evaluator_world import until
from regrade_world import RUN, RegradeWorld, correct, rows

from evald.config import EvalSet
from evald.errors import LedgerError
from evald.evals.grading import Grading
from evald.judge import skipped_record
from evald.point import EvalPoint, PointKey, Snapshot
from evald.regrade.plan import CannotRegrade, What
from evald.results.ledger import Ledger
from evald.results.records import Accepted, AnyRecord, PointRecord, SetRecord


@pytest.fixture
def world(tmp_path: Path, make_model: Any) -> Iterator[RegradeWorld]:
    made = RegradeWorld(tmp_path, make_model())
    yield made
    made.ledger.close()


@pytest.fixture
def toy(make_set: Any) -> EvalSet:
    one: EvalSet = make_set(rows(3), grader="boxed_exact")
    return one


def revisions(world: RegradeWorld, step: int) -> list[int]:
    return [state.key.revision for state in world.ledger.index.revisions(RUN, step)]


async def test_names_that_nobody_knows(world: RegradeWorld, toy: EvalSet) -> None:
    with pytest.raises(CannotRegrade, match="run 'r': no point of it has ended"):
        await world.plan([toy])
    await world.measure(1, [toy], correct)
    with pytest.raises(CannotRegrade, match="step 2 of run 'r': no such point is known"):
        await world.plan([toy], 1, 2)
    with pytest.raises(CannotRegrade, match=r"'tyo': the config has no such eval set \(it has toy"):
        await world.plan([toy], 1, only=["tyo"])
    with pytest.raises(CannotRegrade, match="run 'other': no point of it has ended"):
        await world.regrader([toy]).plan(What(run="other"))


async def test_a_set_that_the_point_does_not_have(
    world: RegradeWorld, toy: EvalSet, make_set: Any
) -> None:
    await world.measure(1, [toy], correct)
    new = make_set(rows(3), "new")
    with pytest.raises(CannotRegrade, match=r"r:step:1\.r0: it has no eval set 'new'"):
        await world.plan([toy, new], 1, only=["new"])
    # and one that the config does not have any more
    with pytest.raises(CannotRegrade, match="toy: the config has no such eval set any more"):
        await world.plan([new], 1)


async def test_kinds_without_a_grader(world: RegradeWorld, toy: EvalSet) -> None:
    scored = msgspec.structs.replace(toy, name="nll", kind="perplexity")
    with pytest.raises(CannotRegrade, match="set 'nll': kind \"perplexity\" has no grader"):
        await world.plan([toy, scored], 1, only=["nll"])
    with pytest.raises(CannotRegrade, match="no eval set with a grader"):
        await world.plan([scored], 1)


async def test_a_point_that_is_being_measured(world: RegradeWorld, toy: EvalSet) -> None:
    await world.measure(1, [toy], correct)
    await world.measure(2, [toy], correct)
    accepted = Accepted(
        run=RUN,
        step=1,
        revision=1,
        record_id="r/step/1/r1/accepted",
        directory="/x",
        size_bytes=1,
        fingerprint="f",
    )
    await world.ledger.append(accepted)
    with pytest.raises(CannotRegrade, match=r"r:step:1\.r1: it is being measured"):
        await world.plan([toy], 1)
    world.open.add(PointKey(RUN, 2))
    with pytest.raises(CannotRegrade, match=r"r:step:2\.r0: it is being measured"):
        await world.plan([toy], 2)
    world.open.clear()
    everything = await world.plan([toy])
    assert [one.source.key.step for one in everything.points] == [2]
    assert len(everything.left_out) == 1


async def test_a_point_without_samples(world: RegradeWorld, toy: EvalSet) -> None:
    snapshot = Snapshot(run=RUN, step=4, directory=Path(), fingerprint="", size_bytes=0)
    skip = skipped_record(EvalPoint(PointKey(RUN, 4), snapshot), "busy", "no time")
    await world.ledger.append(skip)
    with pytest.raises(CannotRegrade, match=r"r:step:4\.r0: it has no samples, as nothing was"):
        await world.plan([toy], 4)
    await world.measure(5, [toy], correct)
    shutil.rmtree(Path(world.results.dir) / "samples")
    with pytest.raises(CannotRegrade, match=r"toy: its samples \S+toy.jsonl are gone"):
        await world.plan([toy], 5)
    with pytest.raises(CannotRegrade, match=r"set 'toy' of r:step:5\.r0: its samples \S+ are gone"):
        await world.plan([toy], 5, only=["toy"])


async def test_samples_of_which_some_are_lost(world: RegradeWorld, toy: EvalSet) -> None:
    await world.measure(1, [toy], correct)
    path = Path(world.results.dir) / "samples/r/step_1.r0/toy.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    with pytest.raises(CannotRegrade, match="has 2 of its samples, but 3 had an answer"):
        await world.regrade([toy], 1)
    assert (revisions(world, 1), world.folders()) == ([0], ["step_1.r0"])


async def test_a_grader_that_is_not_the_one_of_now(
    world: RegradeWorld, make_set: Any, tmp_path: Path
) -> None:
    module = tmp_path / "mine.py"
    module.write_text("def grade(sample):\n    return 1\n")
    (one,) = [
        make_set(
            rows(2),
            grader="python",
            grader_config={"function": "mine:grade", "cwd": str(tmp_path)},
        )
    ]
    await world.measure(1, [make_set(rows(2), grader="boxed_exact")], correct)
    regrader = world.regrader([one])
    module.write_text("def grade(sample):\n    return 0.5\n")
    with pytest.raises(CannotRegrade, match="files of its grader have changed since evald started"):
        await regrader.plan(What(run=RUN))
    expects = {"toy": "what the asker's config says"}
    with pytest.raises(CannotRegrade, match="the running daemon has another config"):
        await world.regrader([one]).plan(What(run=RUN, expects=expects))


async def test_a_regrade_that_is_cancelled_leaves_nothing(
    world: RegradeWorld, toy: EvalSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.measure(1, [toy], correct)
    begun = asyncio.Event()

    async def never(_self: Grading, _rules: object, _sample: object, *, timeout_s: float) -> None:
        assert timeout_s > 0
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Grading, "grade", never)
    work = asyncio.create_task(world.regrade([toy], 1))
    await asyncio.wait_for(begun.wait(), 10)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (revisions(world, 1), world.folders()) == ([0], ["step_1.r0"])
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("regrade")]


async def test_a_revision_that_came_meanwhile_wins(world: RegradeWorld, toy: EvalSet) -> None:
    await world.measure(1, [toy], correct)
    regrader = world.regrader([toy])
    plan = await regrader.plan(What(run=RUN))
    await world.measure(1, [toy], correct, revision=1)
    with pytest.raises(CannotRegrade, match=r"r:step:1\.r1 came while it was graded"):
        await regrader.regrade(plan.points[0], lambda: None)
    assert (revisions(world, 1), world.folders()) == ([0, 1], ["step_1.r0", "step_1.r1"])


class FullDisk:
    """Refuses records of a kind, as a full disk would."""

    def __init__(self, world: RegradeWorld, refused: type[AnyRecord]) -> None:
        self.append = world.ledger.append
        self.refused = refused

    async def __call__(self, record: AnyRecord) -> None:
        if isinstance(record, self.refused):
            raise LedgerError("cannot append: no space")
        await self.append(record)


async def test_a_ledger_that_cannot_be_written(world: RegradeWorld, toy: EvalSet) -> None:
    await world.measure(1, [toy], correct)
    world.ledger.append = FullDisk(world, SetRecord)  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="no space"):
        await world.regrade([toy], 1)
    assert (revisions(world, 1), world.folders()) == ([0], ["step_1.r0"])


async def test_a_revision_without_its_end_is_written_again(
    world: RegradeWorld, toy: EvalSet
) -> None:
    await world.measure(1, [toy], correct)
    world.ledger.append = FullDisk(world, PointRecord)  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="no space"):
        await world.regrade([toy], 1)
    assert revisions(world, 1) == [0, 1]
    world.ledger.close()  # as if the process had been killed between the two records
    world.ledger = Ledger.open(world.results)
    assert await world.regrade([toy], 1) == ["r:step:1.r1 is ok: toy 1.0000 -> 1.0000"]
    assert world.point(1, 1).outcome == "ok"
    assert (revisions(world, 1), world.folders()) == ([0, 1], ["step_1.r0", "step_1.r1"])


async def test_what_a_killed_regrade_has_left_is_no_hindrance(
    world: RegradeWorld, toy: EvalSet
) -> None:
    await world.measure(1, [toy], correct)
    samples = Path(world.results.dir) / "samples/r"
    for name in (".regrade-step_1", "step_1.r1"):
        (samples / name).mkdir()
        (samples / name / "toy.jsonl").write_text("{}\n")
    await world.regrade([toy], 1)
    assert world.folders() == ["step_1.r0", "step_1.r1"]
    assert len(world.samples(1, 1)["toy.jsonl"].splitlines()) == 3


async def test_cancellation_waits_for_the_records_of_a_revision(
    world: RegradeWorld, toy: EvalSet
) -> None:
    await world.measure(1, [toy], correct)
    append, gate = world.ledger.append, asyncio.Event()
    seen: list[AnyRecord] = []

    async def slow(record: AnyRecord) -> None:
        seen.append(record)
        await gate.wait()
        await append(record)

    world.ledger.append = slow  # type: ignore[method-assign]
    work = asyncio.create_task(world.regrade([toy], 1))
    await until(lambda: seen)
    work.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert world.point(1, 1).outcome == "ok"
