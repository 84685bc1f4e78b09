"""What ends before it is done: sets that are cut, points at their deadline, late answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from evaluator_world import DIGEST, LABEL, FakePosture, World, hang, rows_of, until

from evald.config import Aggregate
from evald.errors import EvalSkip
from evald.evals.kinds import Answer
from evald.evals.set_run import SetRun
from evald.evals.stats.aggregate import aggregate_metrics
from evald.point import PinTarget
from evald.postures.contract import Generation, Pin, SetResult
from evald.postures.evaluated import EvaluatedPosture
from evald.results.samples import SampleJournal


def test_bounds_of_an_aggregate_need_those_of_every_set() -> None:
    metrics = {
        "eval/a": 0.5,
        "eval/a-none_reward_ratio": 0.25,
        "eval/a/score_low": 0.5,
        "eval/a/score_high": 0.75,
        "eval/b": 0.75,
        "eval/b-none_reward_ratio": 0.0,
        "eval/odd": 2.0,
        "eval/odd-none_reward_ratio": 0.25,
    }
    questions = {"a": 4, "b": 12, "odd": 4}

    def bounds(*names: str, how: Any = "macro") -> list[float]:
        aggregate = Aggregate(name="all", sets=list(names), how=how)
        found = aggregate_metrics(aggregate, metrics, questions)
        return [
            found[f"eval/all/{end}"]
            for end in ("score_low", "score_high")
            if "eval/all/" + end in found
        ]

    assert bounds("a", "b") == [0.625, 0.75]
    assert bounds("a", "b", how="micro") == [0.6875, 0.75]
    assert bounds("b") == []
    assert bounds("a", "odd") == []


async def test_at_a_share_of_done_samples_the_rest_is_given_up(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(10, "a"), "cut", stragglers="cut", cut_at_share=0.7),
        make_set(rows_of(3, "b"), "whole"),
    ]
    posture = FakePosture(lambda text: hang(text) if text in {"a2", "a5", "a9"} else text)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    cut = next(one for one in world.done if one.name == "cut")
    assert (cut.counts.n_total, cut.counts.n_scored, cut.counts.n_cut) == (10, 7, 3)
    assert cut.counts.n_timeout == 3
    assert (
        result.problem == "cut: 7 of 10 samples were done when it was ended by cut_at_share = 0.7"
    )
    ends = [result.metrics[f"eval/cut{name}"] for name in ("", "/score_low", "/score_high")]
    assert ends == [0.7, 0.7, pytest.approx(1.0)]
    assert result.metrics["eval/whole"] == 1.0
    assert "eval/whole/score_low" not in result.metrics
    assert posture.in_flight == 0


async def test_after_a_time_the_rest_is_given_up(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(4), stragglers="cut", cut_after_s=0.3, cut_at_share=0.99)]
    posture = FakePosture(lambda text: hang(text) if text == "q3" else "wrong")
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert result.problem == "toy: 3 of 4 samples were done when it was ended by cut_after_s = 0.3"
    assert result.metrics["eval/toy/score_low"] == 0.0
    assert result.metrics["eval/toy/score_high"] == 0.25


@pytest.mark.parametrize(
    "what", [{"stragglers": "cut", "cut_after_s": 30.0}, {"set_deadline_s": 30.0}]
)
async def test_time_in_earlier_lives_counts(world: World, make_set: Any, what: Any) -> None:
    world.sets = [make_set(rows_of(4), **what)]
    world.used_s = 29.7
    posture = FakePosture(lambda text: hang(text) if text == "q3" else text)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert (result.counts.n_scored, result.counts.n_cut) == (3, 1)
    world.used_s = 100.0
    result = await asyncio.wait_for(world.evaluate(FakePosture(hang)), 10)
    assert (result.counts.n_resumed, result.counts.n_cut) == (3, 1)


async def test_what_is_done_in_time_is_not_cut(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(4), stragglers="cut", cut_at_share=0.5)]
    # all at once: they are done before anything can be cut
    result = await world.evaluate(FakePosture(str))
    assert result.counts.n_scored + result.counts.n_cut == 4
    world.sets = [make_set(rows_of(20), stragglers="cut", cut_after_s=30.0)]
    result = await world.evaluate(FakePosture(str))
    assert (result.counts.n_scored, result.counts.n_cut, result.problem) == (20, 0, "")


async def test_enough_samples_of_an_earlier_life_leave_none_to_ask(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(4), stragglers="cut", cut_at_share=0.5)]
    first = FakePosture(lambda text: hang(text) if text in {"q1", "q3"} else text)
    await asyncio.wait_for(world.evaluate(first), 10)
    posture = FakePosture(hang)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert (result.counts.n_resumed, result.counts.n_cut, posture.requests) == (2, 2, [])


async def test_an_answer_after_the_end_of_its_set_never_counts(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(3), set_deadline_s=0.3)]
    let_go = asyncio.Event()
    given_up: list[str] = []
    came: list[str] = []

    async def deaf(text: str) -> str:
        """Give an answer even though nobody waits for it any more."""
        if text == "q0":
            return text
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(text)
        await let_go.wait()
        came.append(text)
        return text

    task = asyncio.create_task(world.evaluate(FakePosture(deaf)))
    await until(lambda: len(given_up) == 2)
    let_go.set()
    result = await asyncio.wait_for(task, 10)
    assert sorted(came) == ["q1", "q2"]
    assert (result.counts.n_scored, result.counts.n_cut) == (1, 2)
    assert [sample["question"] for sample in world.journal("toy")] == ["1"]


class Nowhere:
    """Stages that nobody looks at."""

    def state(self, state: str) -> None:
        assert state == "pinning"

    def set_begins(self, name: str) -> float:
        raise AssertionError(name)

    async def set_done(self, result: SetResult) -> None:
        raise AssertionError(result)

    def spare(self) -> None:
        raise AssertionError("nobody waits for an engine")

    async def check_unchanged(self) -> None:
        raise AssertionError


class NeverPinned(FakePosture):
    """Engines that do not come up."""

    async def pin(self, target: PinTarget) -> Pin:
        await asyncio.Event().wait()
        return await super().pin(target)


async def test_a_point_that_is_not_pinned_ends_at_its_deadline(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(1))]
    evaluator, prepared = await world.prepared()
    posture = EvaluatedPosture(NeverPinned(str), evaluator, loads=True)
    deadline = asyncio.get_running_loop().time() + 0.1
    ready = await posture.prepare(prepared.point)
    with pytest.raises(EvalSkip, match=r"no engine served r:step:7\.r0 before") as caught:
        await posture.measure(
            prepared.point, ready, digest=DIGEST, deadline=deadline, stages=Nowhere()
        )
    assert caught.value.reason == "deadline"
    await posture.close()


async def test_a_closed_journal_is_not_opened_again(
    world: World, make_set: Any, tmp_path: Path
) -> None:
    world.sets = [make_set(rows_of(2))]
    evaluator, prepared = await world.prepared()
    run = SetRun(prepared.sets[0], DIGEST, SampleJournal(tmp_path / "samples", "toy"))
    generation = Generation(
        output_ids=[1],
        text="q0",
        finish_reason="stop",
        weight_version=LABEL,
        engine="e",
        latency_s=0.1,
    )
    run.ungraded(0, 0, Answer.of(generation), "no grader")
    run.close()
    run.ungraded(1, 0, Answer.of(generation), "no grader")
    run.close()
    lines = (tmp_path / "samples" / "toy.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert (run.counts().n_grader_error, run.counts().n_cut) == (1, 1)
    await evaluator.close()
