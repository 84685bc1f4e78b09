"""Samples are moved at any instant, lanes die and come back: every answer is the unmoved one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_lanes import BEGIN, World, is_right, response_to

from evald.errors import GenerationFailed
from evald.postures import flights, routing

LANES = 4
#: what happens next, and to which lane.
Action = tuple[str, int]
_lane = st.integers(0, LANES - 1)
_calm = st.tuples(st.sampled_from(["step", "step", "move", "move", "ask", "hop"]), _lane)
_rough = st.tuples(
    st.sampled_from(["step", "step", "move", "move", "ask", "hop", "die", "leave", "deaf"]), _lane
)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "FIRST_RETRY_S", 0.0)
        patch.setattr(flights, "ABORT_AGAIN_S", 0.001)
        yield


class Course:
    """One world, and what was asked in it."""

    def __init__(self, limit: int) -> None:
        self.world = World(LANES, limit=limit)
        #: the prompts of each request.
        self.asked: list[list[bytes]] = []

    async def act(self, action: Action) -> None:
        world, (verb, number) = self.world, action
        lane = world.lanes[number]
        match verb:
            case "step":
                lane.step(number * 5 + 1)
            case "move":
                self.move(number)
            case "ask":
                prompts = [f"{len(self.asked)} {i}".encode() for i in range(number + 1)]
                self.asked.append(prompts)
                world.ask(*prompts)
            case "hop":  # no turn of the loop in between
                lane.step()
                self.move(number)
                lane.give(None)
                lane.give(world.order)
            case "die":
                lane.die()
            case "leave":
                lane.give(None if lane.order else world.order)
            case "deaf":
                lane.deaf = 1
        await asyncio.sleep(0)

    def move(self, number: int) -> None:
        world, lane = self.world, self.world.lanes[number]
        count = world.router.in_flight(world.campaign, lane)
        fit = world.router.movable(world.campaign, lane)
        moved = world.router.move(world.campaign, lane)
        assert moved <= count
        assert fit or moved < count

    async def end(self) -> None:
        """Let everything that can still come come."""
        for lane in self.world.lanes:
            lane.give(self.world.order)
        async with asyncio.timeout(30):
            await asyncio.wait([*self.world.tasks, asyncio.create_task(self.decode())])

    async def decode(self) -> None:
        while not all(task.done() for task in self.world.tasks):
            await self.world.step(50)
            await asyncio.sleep(0.0005)

    def check(self) -> int:
        """Look at all answers; how many samples were moved."""
        world, moved = self.world, 0
        assert world.in_flight() == [0] * LANES
        assert not any(lane.slots.in_flight or lane.running for lane in world.lanes)
        assert not any(lane.distrusted for lane in world.lanes)
        for prompts, task in zip(self.asked, world.tasks, strict=True):
            error = task.exception()
            if error is not None:  # a request that was there when too many died
                assert isinstance(error, GenerationFailed)
                assert "engines died" in str(error)
                continue
            assert len(task.result()) == len(prompts)
            assert all(map(is_right, task.result(), prompts))
            moved += sum(bool(answer.pieces) for answer in task.result())
        return moved


async def played(actions: list[Action], limit: int) -> Course:
    """Go a whole course, and check what came of it."""
    course = Course(limit)
    await course.act(("ask", 0))
    for action in actions:
        await course.act(action)
    await course.end()
    course.check()
    return course


def test_the_courses_move_samples() -> None:
    """Or they would show nothing."""

    async def run() -> None:
        course = Course(8)
        for action in [("ask", 3), ("step", 1), ("move", 0), ("step", 3), ("hop", 1)]:
            await course.act(action)
            await course.world.settle()
        await course.end()
        assert course.check() > 0

    asyncio.run(run())


@given(st.lists(_calm, min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=120, deadline=None)
def test_moved_at_any_instant(actions: list[Action], limit: int) -> None:
    course = asyncio.run(played(actions, limit))
    # each token was credited to the lane that gave it, and each prompt once
    lanes = course.world.lanes
    prompts = [[*prompt, BEGIN] for request in course.asked for prompt in request]
    assert sum(lane.answers for lane in lanes) == len(prompts)
    assert sum(lane.tokens for lane in lanes) == sum(len(response_to(p)) for p in prompts)
    assert sum(lane.prompt_tokens for lane in lanes) == sum(map(len, prompts))


@given(st.lists(_rough, min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=120, deadline=None)
def test_moved_while_lanes_die_leave_and_do_not_hear(actions: list[Action], limit: int) -> None:
    asyncio.run(played(actions, limit))
