"""Which set is asked first, and which samples share a request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from evaluator_world import FakePosture, World, rows_of, text_of, until

from evald.errors import GenerationFailed


def order_of(posture: FakePosture) -> str:
    """Return the sets of the requests, each once, by the first letter of their prompts."""
    return "".join(dict.fromkeys(text_of(request)[0] for request in posture.requests))


async def test_long_answers_are_asked_for_first(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(3, "a"), "a", max_response_len=16),
        make_set(rows_of(1, "b"), "b", max_response_len=64),
        make_set(rows_of(2, "c"), "c", max_response_len=64),
        make_set(rows_of(3, "d"), "d", max_response_len=16),
    ]
    posture = FakePosture(str)
    result = await world.evaluate(posture)
    # of sets with equally long answers the larger one, then as the config has them
    assert order_of(posture) == "cbad"
    names = ["a", "b", "c", "d"]
    assert [key[5:] for key in result.metrics if key[5:] in names] == names


async def test_measured_answers_tell_more_than_limits(world: World, make_set: Any) -> None:
    world.sets = [
        make_set(rows_of(2, "a"), "a", max_response_len=16),
        make_set(rows_of(2, "b"), "b", max_response_len=64),
    ]
    posture = FakePosture(lambda text: text * 9 if text[0] == "a" else text)
    evaluator, prepared = await world.prepared()
    assert order_of(posture) == ""
    for orders in ("ba", "ab"):
        posture.requests.clear()
        pin = await posture.pin(world.target())
        await evaluator.evaluate(prepared, pin, posture, on_set=world.on_set)
        assert order_of(posture) == orders
        for name in "ab":
            (world.results_dir / "samples" / "r" / "step_7.r0" / f"{name}.jsonl").unlink()
    await evaluator.close()


@pytest.mark.parametrize("deterministic", [True, False])
async def test_deterministic_inference_scores_nothing_while_it_generates(
    world: World, make_set: Any, *, deterministic: bool
) -> None:
    world.deterministic = deterministic
    world.sets = [
        make_set([{"prompt": "d0"}], "d", kind="perplexity"),
        make_set(rows_of(2, "a"), "a"),
    ]
    released = asyncio.Event()
    beside: list[bool] = []

    async def reply(text: str) -> str:
        if "d" in text:
            beside.append(not released.is_set())
        else:
            # time enough for the scored set to come, if it may
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until(lambda: beside), 0.3)
            released.set()
        return text

    await world.evaluate(FakePosture(reply))
    assert beside == [not deterministic]


async def test_long_samples_have_a_request_each(world: World, make_set: Any) -> None:
    limits = {"max_response_len": 65, "list_up_to_tokens": 64, "n_samples_per_eval_prompt": 3}
    world.sets = [make_set(rows_of(2), **limits)]
    failed = 0

    def reply(text: str) -> str:
        nonlocal failed
        if text == "q1" and not failed:
            failed += 1
            raise GenerationFailed("error", "engine fell over")
        return text

    posture = FakePosture(reply)
    result = await world.evaluate(posture)
    assert [len(request.sampling) for request in posture.requests] == [1] * 6
    seeds = {request.sampling[0]["sampling_seed"] for request in posture.requests}
    assert len(seeds) == 6
    # the others of that question are not lost with it
    assert (result.counts.n_scored, result.counts.n_error) == (5, 1)
    world.sets = [make_set(rows_of(2), **limits | {"max_response_len": 64})]
    posture = FakePosture(str)
    await world.evaluate(posture)
    assert [len(request.sampling) for request in posture.requests] == [3, 3]


async def test_a_set_with_too_few_scores_says_so(world: World, make_set: Any) -> None:
    def reply(text: str) -> str:
        if text == "q1":
            raise GenerationFailed("error", "no luck")
        return text

    for wanted, too_few in ((2, False), (3, True)):
        world.sets = [make_set(rows_of(3), min_eval_samples=wanted)]
        await world.evaluate(FakePosture(reply))
        assert world.done[-1].too_few is too_few
