from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from step_lanes import BEGIN, LIMIT, STOP, WORDS, StepLane, World, is_right, response_to, text_of

from evald.config import EvalSet
from evald.engines.api import EngineRejected, EngineUnreachable
from evald.errors import GenerationFailed
from evald.evals.sampling import sampling_for
from evald.postures import flights, routing
from evald.postures.contract import GenerateRequest
from evald.postures.progress import MAX_PIECES, Progress, can_move


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(flights, "ABORT_AGAIN_S", 0.001)


def long_prompt(at_least: int = 40) -> bytes:
    """Find a prompt with a long response."""
    return next(
        prompt
        for prompt in (f"question {i}".encode() for i in range(1000))
        if len(response_to([*prompt, BEGIN])) > at_least
    )


PROMPT = long_prompt()
LENGTH = len(response_to([*PROMPT, BEGIN]))


async def moved_after(world: World, tokens: int) -> StepLane:
    """Ask, and move the sample once it has some tokens; where it was."""
    world.ask(PROMPT)
    await world.settle()
    [lane] = [lane for lane in world.lanes if lane.running]
    lane.step(tokens)
    await world.settle()
    assert world.router.movable(world.campaign, lane)
    assert await world.move(lane) == 1
    return lane


@pytest.mark.parametrize("tokens", [0, 1, 2, *range(5, LENGTH, 4), LENGTH - 2, LENGTH - 1])
async def test_a_moved_answer_is_the_unmoved_one(tokens: int) -> None:
    """The seam is anywhere: within a character, and just before the token that ends the answer."""
    world = World(2)
    lane = await moved_after(world, tokens)
    [other] = [one for one in world.lanes if one is not lane]
    assert world.router.in_flight(world.campaign, lane) == 0
    assert world.router.in_flight(world.campaign, other) == 1
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert answer.engine == other.name
    # the newest token of an aborted answer is asked for again
    assert other.asked == [[*PROMPT, BEGIN, *answer.output_ids[:tokens]]]
    given = [(piece.engine, piece.tokens) for piece in answer.pieces]
    whole = [(lane.name, tokens), (other.name, LENGTH - tokens)] if tokens else []
    assert given == whole
    assert (lane.answers, other.answers) == (0, 1)
    assert lane.tokens + other.tokens == LENGTH
    assert lane.prompt_tokens + other.prompt_tokens == len(PROMPT) + 1
    assert not any(one.slots.in_flight for one in world.lanes)


async def test_the_limit_is_that_of_the_whole_answer() -> None:
    for limit, tokens in ((20, 7), (20, 19), (2, 1)):
        world = World(2)
        world.ask(PROMPT, max_new_tokens=limit)
        await world.settle()
        world.lanes[0].step(tokens)
        assert await world.move(world.lanes[0]) == 1
        [answer] = await world.finish()
        assert is_right(answer, PROMPT, limit)
        assert len(answer.pieces) == 2


async def test_the_stop_token_is_in_the_text_if_that_is_wanted() -> None:
    world = World(2)
    world.ask(PROMPT, no_stop_trim=True)
    await world.settle()
    world.lanes[0].step(7)
    await world.move(world.lanes[0])
    [answer] = await world.finish()
    assert answer.text == text_of(response_to([*PROMPT, BEGIN]))
    assert answer.text.endswith("<stop>")


async def test_of_a_list_each_goes_on_from_where_it_is() -> None:
    world = World(2)
    prompts = [f"question {i}".encode() for i in range(12)]
    done = sum(len(response_to([*prompt, BEGIN])) <= 30 for prompt in prompts)
    assert 0 < done < 12
    world.ask(*prompts)
    await world.settle()
    await world.step(30)
    assert world.in_flight() == [12, 0]
    assert await world.move(world.lanes[0]) == 12
    assert world.in_flight() == [0, 12 - done]
    answers = await world.finish()
    assert all(map(is_right, answers, prompts))
    assert sum(bool(answer.pieces) for answer in answers) == 12 - done


async def test_moves_cost_no_wait_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "FIRST_RETRY_S", 3600.0)
    monkeypatch.setattr(routing, "MAX_RETRY_S", 3600.0)
    world = World(2)
    task = world.ask(PROMPT)
    await world.settle()
    for n in range(6):
        lane = world.lanes[n % 2]
        lane.step(3)
        assert await world.move(lane) == 1
    [answer] = await world.finish()
    assert task.done()
    assert is_right(answer, PROMPT)
    assert [piece.tokens for piece in answer.pieces] == [3] * 6 + [LENGTH - 18]


async def test_moves_of_a_sample_are_bounded() -> None:
    world = World(2)
    world.ask(PROMPT)
    await world.settle()
    moves = 0
    for n in range(40):
        lane = world.lanes[n % 2]
        lane.step(2)
        await world.settle()
        if not world.router.movable(world.campaign, lane):
            break
        moves += await world.move(lane)
    assert moves == MAX_PIECES
    assert await world.move(lane) == 0
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)


async def test_never_back_to_the_lane_that_is_freed_while_another_serves() -> None:
    world = World(2, limit=1)
    world.ask(PROMPT)
    world.ask(PROMPT)
    await world.settle()
    freed, full = world.lanes
    assert world.in_flight() == [1, 1]
    freed.step(9)
    await world.move(freed)
    # there is room on the freed one only
    assert world.in_flight() == [0, 1]
    full.step(LENGTH)
    await world.settle()
    assert world.in_flight() == [0, 1]
    assert all(is_right(answer, PROMPT) for answer in await world.finish())
    # with no other one left it is as good as any
    world.ask(PROMPT)
    await world.settle()
    [lane] = [lane for lane in world.lanes if lane.running]
    [other] = [one for one in world.lanes if one is not lane]
    other.give(None)
    await world.move(lane)
    assert world.router.in_flight(world.campaign, lane) == 1
    assert is_right((await world.finish())[-1], PROMPT)


async def test_an_abort_that_comes_too_early_is_said_again() -> None:
    world = World(2)
    world.lanes[0].deaf = 3
    world.ask(PROMPT)
    await world.settle()
    world.lanes[0].step(5)
    assert await world.move(world.lanes[0]) == 1
    assert await world.move(world.lanes[0]) == 0  # it is being moved already
    assert world.in_flight() == [1, 0]
    async with asyncio.timeout(30):
        while world.in_flight() != [0, 1]:
            await asyncio.sleep(0.001)
    said = world.lanes[0].aborts
    assert said > 3
    [answer] = await world.finish()
    assert len(answer.pieces) == 2
    await asyncio.sleep(0.02)
    assert world.lanes[0].aborts == said  # and no more, once it has been heard
    assert is_right(answer, PROMPT)


@pytest.mark.parametrize("version", ["somebody-else", None])
async def test_a_piece_of_other_weights_is_void(version: str | None) -> None:
    world = World(3)
    lane = await moved_after(world, 9)
    [second] = [one for one in world.lanes if one.running]
    mine, second.version = second.version, version
    second.step(9)
    await world.move(second)
    assert second.distrusted
    second.version = mine
    second.give(None)
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert answer.pieces == ()
    [third] = [one for one in world.lanes if one not in (lane, second)]
    assert [*PROMPT, BEGIN] in lane.asked[1:] + third.asked


async def test_an_engine_that_dies_instead_of_answering_costs_what_it_had() -> None:
    world = World(2)
    world.ask(PROMPT)
    await world.settle()
    lane, other = world.lanes
    lane.step(9)
    lane.deaf = 10**6
    await world.move(lane)
    lane.die()
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert answer.pieces == ()
    assert [*lane.asked, *other.asked] == [[*PROMPT, BEGIN]] * 2


async def test_what_another_engine_had_given_stays_when_one_dies() -> None:
    world = World(3)
    lane = await moved_after(world, 9)
    [second] = [one for one in world.lanes if one.running]
    second.step(9)
    second.die()
    lane.give(None)
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert [piece.tokens for piece in answer.pieces] == [9, LENGTH - 9]


async def test_another_lane_decodes_if_the_last_one_cannot() -> None:
    world = World(3)
    lane = await moved_after(world, 9)
    [second] = [one for one in world.lanes if one.running]
    second.mute = EngineUnreachable("connection reset")
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert answer.pieces[0].engine == lane.name
    assert world.router.movable(world.campaign, second)


async def test_servers_that_cannot_decode_end_all_moving() -> None:
    world = World(2)
    for lane in world.lanes:
        lane.mute = EngineRejected("detokenize: HTTP 404: Not Found")
    lane = await moved_after(world, 9)
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    assert answer.pieces == ()
    assert not world.router.movable(world.campaign, lane)


async def test_a_continuation_that_is_refused_starts_again_and_stays() -> None:
    world = World(2)
    for lane in world.lanes:
        lane.longest = len(PROMPT) + 5
    await moved_after(world, 9)
    [lane] = [lane for lane in world.lanes if lane.running]
    assert not world.router.movable(world.campaign, lane)
    assert await world.move(lane) == 0
    [answer] = await world.finish()
    assert is_right(answer, PROMPT)
    world.ask(b"a question that is too long from the beginning")
    with pytest.raises(GenerationFailed, match="too long"):
        await world.finish()


async def test_a_point_that_ends_while_its_samples_move() -> None:
    world = World(2)
    lane = await moved_after(world, 9)
    world.campaign.closed = True
    with pytest.raises(GenerationFailed, match="the point has ended"):
        await world.finish()
    assert world.in_flight() == [0, 0]
    assert lane.slots.in_flight == 0


async def test_a_request_that_is_given_up_while_it_moves() -> None:
    world = World(2)
    task = world.ask(PROMPT)
    await world.settle()
    world.lanes[0].deaf = 1
    await world.move(world.lanes[0])
    task.cancel()
    await world.settle()
    assert task.cancelled()
    assert world.in_flight() == [0, 0]
    assert not any(lane.running or lane.slots.in_flight for lane in world.lanes)


def test_what_an_eval_set_sends_can_be_moved() -> None:
    eval_set = msgspec.convert({"name": "s", "path": "x", "temperature": 1.0}, EvalSet)
    for sampling in sampling_for(eval_set, "q", [0, 1]):
        assert can_move(sampling)
    for fields in ({"stop": ["END"]}, {"repetition_penalty": 1.1}):
        changed = msgspec.convert({"name": "s", "path": "x", **fields}, EvalSet)
        assert not can_move(sampling_for(changed, "q", [0])[0])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, True),
        ({"top_k": 20, "min_p": 0.1, "stop_token_ids": [7], "n": 1}, True),
        ({"stop": []}, True),
        ({"stop": "END"}, False),
        ({"stop_regex": "E.D"}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"presence_penalty": -0.1}, False),
        ({"json_schema": "{}"}, False),
        ({"regex": "a"}, False),
        ({"ebnf": "a"}, False),
        ({"structural_tag": "a"}, False),
        ({"custom_params": {"budget": 3}}, False),
        ({"json_schema": None}, True),
        ({"n": 2}, False),
        ({"something_new": 1}, False),
        ({"max_new_tokens": None}, False),
    ],
)
def test_what_can_be_moved(sampling: dict[str, Any], expected: bool) -> None:
    assert can_move({"max_new_tokens": 8} | sampling) == expected


def test_prompts_that_are_scored_stay() -> None:
    request = GenerateRequest(
        prompts=[[1, 2]], sampling=[{"max_new_tokens": 0}], score_from=[1], rid="q", timeout_s=1.0
    )
    assert not Progress(request).samples[0].movable


def test_the_words_have_characters_of_several_tokens() -> None:
    """Or no seam would be within one."""
    assert len(WORDS) > len(WORDS.decode())
    assert STOP < LIMIT * 2
