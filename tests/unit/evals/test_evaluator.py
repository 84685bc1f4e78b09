from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evald.config import Dispatch, Results
from evald.errors import EvaldError, GenerationFailed, LedgerError, Unhealthy
from evald.evals.evaluator import Evaluator, PreparedPoint
from evald.evals.sets import load_set
from evald.point import EvalPoint, PinTarget, PointKey, Snapshot
from evald.postures.contract import GenerateRequest, Generation, Pin, PointResult, SetResult
from evald.status.view import EngineView

DIGEST = "0123456789abcdef"
LABEL = "r:7:01234567:n"


class FakePosture:
    """Answers with what ``reply`` says of the prompt's text; counts what is in flight."""

    def __init__(self, reply: Callable[[str], Awaitable[str] | str], *, capacity: int = 8) -> None:
        self.reply = reply
        self.requests: list[GenerateRequest] = []
        self.in_flight = 0
        self.peak = 0
        self.size = capacity
        self.finish_reason = "stop"

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        assert pin.target.step == 7
        self.requests.append(request)
        self.in_flight += len(request.sampling)
        self.peak = max(self.peak, self.in_flight)
        try:
            text = self.reply(text_of(request))
            if not isinstance(text, str):
                text = await text
            await asyncio.sleep(0)
        finally:
            self.in_flight -= len(request.sampling)
        return [
            Generation(
                output_ids=[1] * len(text),
                text=text,
                finish_reason=self.finish_reason,
                weight_version=LABEL,
                engine="engine-0",
                latency_s=0.01,
            )
            for _ in request.sampling
        ]

    def capacity(self) -> int:
        return self.size

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def pin(self, target: PinTarget) -> Pin:
        return Pin(target=target, weight_versions={"engine-0": LABEL})

    async def unpin(self, pin: Pin) -> None:
        assert pin.target.step == 7

    async def confirm(self, pin: Pin) -> None:
        assert pin.target.step == 7

    async def restart(self, engine: str) -> None:
        raise EvaldError(engine)

    async def release(self, engine: str) -> None:
        raise EvaldError(engine)

    def engines(self) -> list[EngineView]:
        return []


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def text_of(request: GenerateRequest) -> str:
    """Undo the byte-level tokenizer of conftest for ASCII text."""
    return "".join(chr(33 + i) for i in request.prompts[0])


def rows_of(n: int, prefix: str = "q") -> list[dict[str, Any]]:
    """Give questions whose right answer is the prompt itself."""
    return [{"prompt": f"{prefix}{i}", "label": f"{prefix}{i}"} for i in range(n)]


class World:
    """An evaluator over toy sets, and what it reports."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.results_dir = tmp_path / "results"
        self.model = model
        self.sets: list[Any] = []
        self.done: list[SetResult] = []
        self.on_set_error: Exception | None = None
        self.sample_timeout_s = 600.0
        self.evaluator: Evaluator | None = None

    async def on_set(self, result: SetResult) -> None:
        self.done.append(result)
        if self.on_set_error is not None:
            raise self.on_set_error

    async def prepared(self) -> tuple[Evaluator, PreparedPoint]:
        self.evaluator = Evaluator(
            [load_set(one) for one in self.sets],
            dispatch=Dispatch(sample_timeout_s=self.sample_timeout_s),
            results=Results(dir=str(self.results_dir)),
            model_dir=self.model,
        )
        snapshot = Snapshot(
            run="r", step=7, directory=self.model, fingerprint="f", size_bytes=1, digest=DIGEST
        )
        point = EvalPoint(PointKey("r", 7), snapshot)
        return self.evaluator, await self.evaluator.prepare(point)

    async def evaluate(
        self, posture: FakePosture, *, within_s: float | None = None, digest: str = DIGEST
    ) -> PointResult:
        evaluator, prepared = await self.prepared()
        target = PinTarget(run="r", step=7, digest=digest, directory=self.model)
        deadline = None if within_s is None else asyncio.get_running_loop().time() + within_s
        try:
            return await evaluator.evaluate(
                prepared,
                await posture.pin(target),
                posture,
                on_set=self.on_set,
                deadline=deadline,
            )
        finally:
            await evaluator.close()

    def journal(self, name: str) -> list[dict[str, Any]]:
        path = self.results_dir / "samples" / "r" / "step_7.r0" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path, make_model: Any) -> World:
    return World(tmp_path, make_model())


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
        await both.wait()
        return text

    posture.reply = together
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert result.counts.n_scored == 2


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
    assert (result.counts.n_scored, result.counts.n_error) == (2, 1)
    assert "question 3 (error): the prompt has 1600 tokens" in result.problem
    assert len(posture.requests) == 2


async def test_a_grader_that_fails_is_not_a_wrong_answer(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2), grader="regex", regex="q\\d|(a+)+b", grader_timeout_s=1.0)]
    result = await world.evaluate(FakePosture(lambda text: text if text == "q0" else "a" * 40))
    assert (result.counts.n_scored, result.counts.n_grader_error) == (1, 1)
    assert "was killed" in result.problem
    assert result.metrics["eval/toy/response_len/max"] == 40.0
    bad = next(s for s in world.journal("toy") if s["status"] == "grader_error")
    assert (bad["response"], bad["score"]) == ("a" * 40, None)


async def test_scored_samples_are_not_asked_again(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(4), n_samples_per_eval_prompt=2)]
    broken = True

    def reply(text: str) -> str:
        if broken and text == "q3":
            raise GenerationFailed("error", "engine fell over")
        return text

    posture = FakePosture(reply)
    first = await world.evaluate(posture)
    assert first.counts.n_error == 2
    path = world.results_dir / "samples" / "r" / "step_7.r0" / "toy.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"question":"2","sample":1' not in line))
    broken = False
    posture.requests.clear()
    second = await world.evaluate(posture)
    asked = sorted((text_of(r), len(r.sampling)) for r in posture.requests)
    assert asked == [("q1", 1), ("q3", 2)]
    assert (second.counts.n_scored, second.counts.n_resumed) == (8, 5)
    assert second.metrics["eval/toy"] == 1.0
    assert second.metrics["eval/toy/response_len/mean"] == 2.0


async def test_other_weights_or_another_config_are_asked_again(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2))]
    await world.evaluate(FakePosture(str))
    other = await world.evaluate(FakePosture(str), digest="f" * 16)
    assert other.counts.n_resumed == 0
    world.sets = [make_set(rows_of(2), temperature=0.7)]
    again = await world.evaluate(FakePosture(str))
    assert again.counts.n_resumed == 0
    fewer = await world.evaluate(FakePosture(str))
    assert fewer.counts.n_resumed == 2


async def test_samples_beyond_a_smaller_n_do_not_come_back(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2), n_samples_per_eval_prompt=3)]
    await world.evaluate(FakePosture(str))
    world.sets = [make_set(rows_of(2), n_samples_per_eval_prompt=1)]
    result = await world.evaluate(FakePosture(str))
    assert (result.counts.n_total, result.counts.n_resumed) == (2, 2)


async def hang(_text: str) -> str:
    await asyncio.Event().wait()
    return ""


async def test_a_set_out_of_time_does_not_hold_the_others(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(50, "a"), "stuck", set_deadline_s=0.5),
        make_set(rows_of(5, "b"), "fine"),
    ]
    posture = FakePosture(lambda text: hang(text) if text[0] == "a" and text != "a0" else text)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    stuck = next(one for one in world.done if one.name == "stuck")
    assert (stuck.counts.n_scored, stuck.counts.n_timeout) == (1, 49)
    assert result.metrics["eval/fine"] == 1.0
    assert result.metrics["eval/stuck"] == 0.02
    assert posture.in_flight == 0


async def test_at_the_points_deadline_the_result_is_what_there_is(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(30, "a"), "one"), make_set(rows_of(3, "b"), "never")]
    posture = FakePosture(lambda text: text if text in {"a0", "a1"} else hang(text))
    result = await asyncio.wait_for(world.evaluate(posture, within_s=1.0), 10)
    assert (result.counts.n_total, result.counts.n_scored, result.counts.n_timeout) == (33, 2, 31)
    assert {one.name: one.counts.n_timeout for one in world.done} == {"one": 28, "never": 3}
    assert result.metrics["eval/one"] == pytest.approx(2 / 30)
    assert posture.in_flight == 0


async def test_engines_that_do_not_serve_end_the_point(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(20))]

    def reply(text: str) -> Awaitable[str] | str:
        if text == "q5":
            raise Unhealthy("no engine serves")
        return text if text < "q3" else hang(text)

    posture = FakePosture(reply)
    with pytest.raises(Unhealthy, match="no engine serves"):
        await asyncio.wait_for(world.evaluate(posture), 10)
    assert posture.in_flight == 0
    assert {s["question"] for s in world.journal("toy")} >= {"1", "2"}


async def test_a_bug_is_not_taken_for_an_outcome(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(3))]

    def reply(text: str) -> str:
        raise {"q0": ZeroDivisionError("bug"), "q1": Unhealthy("x"), "q2": Unhealthy("y")}[text]

    with pytest.raises(ExceptionGroup):
        await world.evaluate(FakePosture(reply))


async def test_a_ledger_that_cannot_be_written_wins_over_a_skip(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(1, "a"), "one"), make_set(rows_of(2, "b"), "two")]
    world.on_set_error = LedgerError("disk full")

    async def reply(text: str) -> str:
        if text == "a0":
            return text
        with failing_on_cancel():
            await asyncio.Event().wait()
        return ""

    with pytest.raises(LedgerError, match="disk full"):
        await asyncio.wait_for(world.evaluate(FakePosture(reply)), 10)


async def test_samples_that_cannot_be_written_stop_loudly(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2))]
    world.results_dir.mkdir()
    (world.results_dir / "samples").write_text("in the way")
    with pytest.raises(LedgerError, match=r"cannot keep samples in .*toy.jsonl: Not a directory"):
        await world.evaluate(FakePosture(str))


async def test_impossible_samples_of_a_journal_are_not_resumed(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(2))]
    await world.evaluate(FakePosture(str))
    path = world.results_dir / "samples" / "r" / "step_7.r0" / "toy.jsonl"
    first, second = world.journal("toy")
    odd = [first | {"sample": -1}, first | {"sample": 1}, first | {"question": "9"}]
    lines = [*odd, second | {"score": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = await world.evaluate(FakePosture(str))
    assert (result.counts.n_total, result.counts.n_scored) == (2, 2)
    assert (result.counts.n_resumed, result.counts.n_timeout) == (0, 0)


async def test_a_stop_leaves_a_journal_from_which_the_point_resumes(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(20))]
    posture = FakePosture(lambda text: text if text in {"q0", "q1"} else hang(text))
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: posture.in_flight == 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert posture.in_flight == 0
    assert world.done == []
    assert {s["question"] for s in world.journal("toy")} == {"1", "2"}
    result = await world.evaluate(FakePosture(str))
    assert (result.counts.n_scored, result.counts.n_resumed) == (20, 2)


async def test_a_stop_is_not_hidden_by_engines_that_fail_meanwhile(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(2))]

    async def reply(_text: str) -> str:
        with failing_on_cancel():
            await asyncio.Event().wait()
        return ""

    posture = FakePosture(reply)
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: posture.in_flight == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextmanager
def failing_on_cancel() -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        raise Unhealthy("engines stop") from None


async def test_finished_samples_reach_the_disk_while_others_run(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(3))]
    posture = FakePosture(lambda text: text if text == "q0" else hang(text))
    task = asyncio.create_task(world.evaluate(posture))
    path = world.results_dir / "samples" / "r" / "step_7.r0" / "toy.jsonl"
    await until(path.exists)
    await until(lambda: [sample["question"] for sample in world.journal("toy")] == ["1"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_progress_can_be_seen(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(4, "a"), "one"), make_set(rows_of(2, "b"), "two")]
    posture = FakePosture(lambda text: {"a0": "a0", "a1": "wrong"}.get(text) or hang(text))
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: posture.in_flight == 4)
    assert world.evaluator is not None
    one, two = world.evaluator.view()
    assert (one.name, one.done, one.total, one.score) == ("one", 2, 4, 0.5)
    assert (two.name, two.done, two.total, two.score) == ("two", 0, 2, None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.evaluator.view() == []


async def test_a_slow_grader_does_not_keep_the_engines_waiting(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(6), grader="regex", regex="(a+)+b", grader_timeout_s=30.0)]
    posture = FakePosture(lambda _text: "a" * 60, capacity=2)
    task = asyncio.create_task(world.evaluate(posture))
    await until(lambda: len(posture.requests) == 6)
    assert world.evaluator is not None
    assert world.evaluator.view()[0].done == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_sets_with_nothing_left_end_at_once(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(3))]
    await world.evaluate(FakePosture(str))
    posture = FakePosture(hang)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert (result.counts.n_resumed, posture.requests) == (3, [])
    assert world.done[-1].seconds == 0.0
