"""The sets of a point: asked, graded, counted."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from evaluator_world import (
    LABEL,
    FakePosture,
    World,
    hang,
    rows_of,
    until,
)

from evald.errors import GenerationFailed
from evald.evals.worker_pool import WorkerPool


async def test_all_sets_are_asked_graded_and_recorded(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(5, "a"), "one"),
        make_set(rows_of(4, "b"), "two", n_samples_per_eval_prompt=2),
    ]
    posture = FakePosture(lambda text: "wrong" if text == "b0" else text)
    result = await world.evaluate(posture)
    assert result.metrics["eval/one"] == 1.0
    assert result.metrics["eval/two"] == 0.75
    assert result.metrics["eval/two-pass@2"] == 0.75
    assert result.metrics["eval/one/weight_version/mean"] == 7.0
    assert (result.counts.n_total, result.counts.n_scored) == (13, 13)
    assert result.engines == ["engine-0"]
    assert result.weight_versions == [LABEL]
    assert result.problem == ""
    assert sorted(one.name for one in world.done) == ["one", "two"]
    two = next(one for one in world.done if one.name == "two")
    assert (two.counts.n_total, two.seconds > 0) == (8, True)
    assert two.metrics["eval/two"] == 0.75
    assert len(world.journal("two")) == 8
    sample = world.journal("one")[0]
    assert sample["status"] == "scored"
    assert sample["response"] == sample["reference"] == "a0"
    assert (sample["engine"], sample["weight_version"], sample["n_tokens"]) == (
        "engine-0",
        LABEL,
        2,
    )


async def test_one_request_carries_all_samples_of_a_question_with_their_seeds(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(2), n_samples_per_eval_prompt=3)]
    world.sample_timeout_s = 12.5
    posture = FakePosture(str)
    await world.evaluate(posture)
    assert [len(request.sampling) for request in posture.requests] == [3, 3]
    seeds = {s["sampling_seed"] for request in posture.requests for s in request.sampling}
    assert len(seeds) == 6
    assert len({request.rid for request in posture.requests}) == 2
    assert {request.timeout_s for request in posture.requests} == {12.5}


async def test_requests_stay_within_a_capacity_that_changes(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(40), n_samples_per_eval_prompt=2)]
    posture = FakePosture(str, capacity=4)

    async def slow(text: str) -> str:
        await asyncio.sleep(0.005)
        if len(posture.requests) == 20:
            assert posture.peak == 4
            posture.size = 10
        return text

    posture.reply = slow
    await world.evaluate(posture)
    assert posture.peak == 10


async def test_capacity_below_one_question_still_gets_through(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(3), n_samples_per_eval_prompt=4)]
    posture = FakePosture(str, capacity=1)
    result = await world.evaluate(posture)
    assert result.counts.n_scored == 12
    assert posture.peak == 4


async def test_capacity_that_grows_is_seen_without_an_answer(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2))]
    posture = FakePosture(str, capacity=1)
    both = asyncio.Event()

    async def together(text: str) -> str:
        if posture.in_flight == 2:
            both.set()
        posture.size = 2
        posture.wake()
        await both.wait()
        return text

    posture.reply = together
    result = await asyncio.wait_for(world.evaluate(posture), 3)
    assert result.counts.n_scored == 2


async def test_a_large_fleet_is_filled_step_by_step(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(200))]
    posture = FakePosture(str, capacity=1000)
    begun, all_there = [0], asyncio.Event()

    async def once_all_are_there(text: str) -> str:
        await all_there.wait()
        return text

    async def look() -> None:
        while begun[-1] < 200:
            await asyncio.sleep(0)
            begun.append(posture.in_flight)
        all_there.set()

    posture.reply = once_all_are_there
    async with asyncio.TaskGroup() as group:
        group.create_task(look())
        result = await world.evaluate(posture)
    assert result.counts.n_scored == 200
    steps = [after - before for before, after in pairwise(begun)]
    # what began in one turn of the loop leaves it to the others before the next ones begin
    assert max(steps) <= 16


async def test_engines_hear_how_many_samples_are_left(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(3), "one", n_samples_per_eval_prompt=2),
        make_set(rows_of(2, "b"), "two"),
    ]
    posture = FakePosture(str, capacity=2)

    async def slow(text: str) -> str:
        await asyncio.sleep(0.01)
        if len(posture.requests) < 5:  # capacity for two samples: there are more questions
            assert posture.samples_left == []
        return text

    posture.reply = slow
    result = await world.evaluate(posture)
    assert result.counts.n_scored == 8
    assert posture.samples_left == [2, 1, 0]


@pytest.mark.parametrize(
    ("kind", "count"), [("timeout", "n_timeout"), ("rejected", "n_error"), ("error", "n_error")]
)
async def test_a_failed_request_costs_its_samples_only(
    world: World, make_set: Any, kind: str, count: str
) -> None:
    world.sets = [make_set(rows_of(4), n_samples_per_eval_prompt=2)]

    def reply(text: str) -> str:
        if text == "q1":
            raise GenerationFailed(kind, "no luck")
        return text

    result = await world.evaluate(FakePosture(reply))
    assert getattr(result.counts, count) == 2
    assert result.counts.n_scored == 6
    assert result.metrics["eval/toy"] == 0.75
    assert result.metrics["eval/toy/mean_scored"] == 1.0
    status = "timeout" if kind == "timeout" else "error"
    assert result.problem == f"toy: question 2 ({status}): no luck"
    failed = [sample for sample in world.journal("toy") if sample["status"] == status]
    assert [(s["question"], s["sample"], s["grader_reason"]) for s in failed] == [
        ("2", 0, "no luck"),
        ("2", 1, "no luck"),
    ]


async def test_truncated_and_missing_answers_are_counted(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2), grader="boxed_exact")]
    posture = FakePosture(lambda text: f"\\boxed{{{text}}}" if text == "q0" else "\\boxed{q1")
    posture.finish_reason = "length"
    result = await world.evaluate(posture)
    assert (result.counts.n_truncated, result.counts.n_no_answer) == (2, 1)
    assert result.metrics["eval/toy"] == 0.5


async def test_a_question_that_cannot_be_asked_is_an_error(world: World, make_set: Any) -> None:
    world.sets = [make_set([*rows_of(2), {"prompt": "x" * 1600, "label": 1}])]
    posture = FakePosture(str)
    result = await world.evaluate(posture)
    assert (result.counts.n_scored, result.counts.n_error, result.counts.n_too_long) == (2, 1, 1)
    assert result.counts.n_total == 3
    assert "question 3 (error): the prompt has 1600 tokens" in result.problem
    assert result.problem.endswith("; toy: too long for the context: questions 3")
    assert result.metrics["eval/toy/too_long_ratio"] == pytest.approx(1 / 3)
    assert [sample["too_long"] for sample in world.journal("toy")] == [True, False, False]
    assert len(posture.requests) == 2


async def test_a_grader_that_fails_is_not_a_wrong_answer(world: World, make_set: Any) -> None:
    world.workers = WorkerPool(size=1)
    world.sets = [make_set(rows_of(2), grader="regex", regex="q\\d|(a+)+b", grader_timeout_s=1.0)]
    result = await world.evaluate(FakePosture(lambda text: text if text == "q0" else "a" * 40))
    assert (result.counts.n_scored, result.counts.n_grader_error) == (1, 1)
    assert "was killed" in result.problem
    assert result.metrics["eval/toy/response_len/max"] == 40.0
    bad = next(s for s in world.journal("toy") if s["status"] == "grader_error")
    assert (bad["response"], bad["score"]) == ("a" * 40, None)


async def test_progress_can_be_seen(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(4, "a"), "one"), make_set(rows_of(2, "b"), "two")]
    posture = FakePosture(lambda text: {"a0": "a0", "a1": "wrong"}.get(text) or hang(text))
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: posture.in_flight == 4)
    one, two = world.view()
    assert (one.name, one.done, one.total, one.score) == ("one", 2, 4, 0.5)
    assert (two.name, two.done, two.total, two.score) == ("two", 0, 2, None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.view() == []


async def test_the_time_left_is_told_from_the_pace_of_the_set(
    world: World, make_set: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evald.evals.pace._LEAST_S", 0.0)
    world.sets = [make_set(rows_of(20), "one"), make_set(rows_of(2, "b"), "two")]
    posture = FakePosture(lambda text: hang(text) if text == "q19" else text)
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: 19 in [s.done for s in world.view()])
    one, _ = world.view()
    assert one.left_s is not None
    await until(lambda: world.view()[1].left_s == 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("questions", "capacity"), [(6, 2), (150, 80)])
async def test_a_slow_grader_does_not_keep_the_engines_waiting(
    world: World, make_set: Any, questions: int, capacity: int
) -> None:
    world.workers = WorkerPool(size=1)
    rows = rows_of(questions)
    world.sets = [make_set(rows, grader="regex", regex="(a+)+b", grader_timeout_s=30.0)]
    posture = FakePosture(lambda _text: "a" * 60, capacity=capacity)
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: len(posture.requests) == questions)
    assert world.view()[0].done == 0
    # the engines are of no use to it any more, and are told so
    await until(lambda: posture.samples_left[-1:] == [0])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
