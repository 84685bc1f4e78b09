"""What ends a point early, and how it goes on from its samples."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from evaluator_world import (
    FakePosture,
    World,
    failing_on_cancel,
    hang,
    rows_of,
    text_of,
    until,
)

from evald.errors import GenerationFailed, LedgerError, Unhealthy


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


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full is looked at, and samples are written, at once."""
    monkeypatch.setattr("evald.results.pause.LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr("evald.evals.point_run.FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr("evald.results.samples.FLUSH_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("_soon")
async def test_while_samples_cannot_be_written_nothing_new_is_asked_and_no_time_runs(
    world: World, make_set: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sets = [make_set(rows_of(40))]
    world.results_dir.mkdir()
    asked: list[str] = []
    full = False
    left = 50
    write = os.write

    def maybe(descriptor: int, content: bytearray) -> int:
        nonlocal left
        if not full or "toy.jsonl" not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return write(descriptor, content)
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, content[:left])  # the disk takes what fits
        left -= written
        return written

    async def reply(text: str) -> str:
        nonlocal full
        asked.append(text)
        full = full or len(asked) == 10
        await asyncio.sleep(0.01)
        return text

    monkeypatch.setattr(os, "write", maybe)
    evaluating = asyncio.create_task(world.evaluate(FakePosture(reply), within_s=0.6))
    await until(lambda: world.pause.why)
    await asyncio.sleep(0.1)
    so_far = len(asked)
    await asyncio.sleep(0.8)  # longer than the point had time
    assert len(asked) == so_far < 40
    assert not evaluating.done()
    assert "toy.jsonl: No space left on device; make room" in world.pause.why
    full = False
    result = await asyncio.wait_for(evaluating, 10)
    assert world.pause.why == ""
    assert result.counts.n_scored == len(asked) == 40
    assert len({line["question"] for line in world.journal("toy")}) == 40


@pytest.mark.usefixtures("_soon")
async def test_a_point_can_be_given_up_while_its_samples_cannot_be_written(
    world: World, make_set: Any
) -> None:
    world.sets = [make_set(rows_of(2))]
    world.results_dir.mkdir()
    (world.results_dir / "samples").write_text("in the way")
    evaluating = asyncio.create_task(world.evaluate(FakePosture(str)))
    await until(lambda: world.pause.why)
    assert "toy.jsonl: Not a directory" in world.pause.why
    evaluating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    assert world.pause.why == ""


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


async def test_sets_with_nothing_left_end_at_once(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows_of(3))]
    await world.evaluate(FakePosture(str))
    posture = FakePosture(hang)
    result = await asyncio.wait_for(world.evaluate(posture), 10)
    assert (result.counts.n_resumed, posture.requests) == (3, [])
    assert world.done[-1].seconds == 0.0
