from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from evald.engines.adaptive import AdaptiveLimit, read_load
from evald.engines.api import EngineRejected, EngineUnreachable
from evald.engines.limit_search import Load
from evald.engines.server_size import MOST, START_LIMIT, ServerSize
from evald.engines.slots import Slots

LOOK_S = 0.002
#: what one look counts as, so that a busy machine changes no rate.
TICK_S = 1.0


def rank(**values: Any) -> dict[str, Any]:
    """One rank as SGLang 0.5.23 tells it."""
    return {
        "dp_rank": 0,
        "num_running_reqs": 40,
        "num_waiting_reqs": 0,
        "token_usage": 0.25,
        "gen_throughput": 1000.0,
        "max_running_requests": 128,
        "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0},
        **values,
    }


@pytest.mark.parametrize(
    ("answer", "load"),
    [
        (
            {"loads": [rank()]},
            Load(running=40, waiting=0, token_usage=0.25, tokens_per_s=1000.0),
        ),
        (
            {
                "loads": [
                    rank(num_waiting_reqs=3, token_usage=0.5, queues={"retracted": 2}),
                    rank(dp_rank=1, num_running_reqs=1, gen_throughput=10.0),
                ]
            },
            Load(running=41, waiting=3, token_usage=0.5, retracted=2, tokens_per_s=1010.0),
        ),
        (
            {"loads": [rank(gen_throughput=0.0, queues=None)]},
            Load(running=40, waiting=0, token_usage=0.25),
        ),
        (
            {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2, "token_usage": 0}]},
            Load(running=1, waiting=2, token_usage=0),
        ),
        ({"loads": [rank(token_usage=None)]}, None),
        ({"loads": [rank(num_running_reqs=True)]}, None),
        ({"loads": [rank(num_waiting_reqs=-1)]}, None),
        ({"loads": []}, None),
        ({"loads": ["busy"]}, None),
        ({"loads": {}}, None),
        ({}, None),
    ],
)
def test_what_a_server_tells(answer: dict[str, Any], load: Load | None) -> None:
    assert read_load(answer) == load


class Engine:
    """Requests that always fill the limit, and a server that tells its load."""

    def __init__(self, *, most: int | None = None) -> None:
        self.clock_s = 0.0
        self.asked = 0
        self.error: Exception | None = None
        self.room = 0
        self.filling = True
        self.rank: dict[str, Any] = {}
        self.slots = Slots(1, self._on_room)
        self.adaptive = AdaptiveLimit(
            self.slots, engine="e", most=most, look_s=LOOK_S, clock=self._clock
        )

    def _on_room(self) -> None:
        self.room += 1

    def _clock(self) -> float:
        self.clock_s += TICK_S / 2  # read once at the beginning and once at the end of a look
        return self.clock_s

    def fill(self) -> None:
        while self.slots.fits(1):
            self.slots.enter(1)

    def empty(self) -> None:
        self.slots.leave(self.slots.in_flight)

    async def loads(self) -> Mapping[str, Any]:
        self.asked += 1
        if self.filling:
            self.fill()
        for _ in range(self.slots.in_flight):
            self.adaptive.note_tokens(10)
        if self.error is not None:
            raise self.error
        running = self.slots.in_flight
        told = {"num_running_reqs": running, "gen_throughput": running * 10.0, **self.rank}
        return {"loads": [rank(**told)]}

    @contextlib.asynccontextmanager
    async def looked_at(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.adaptive.run(self.loads))
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def load(self) -> Load | None:
        return self.adaptive.meter.load

    async def looks(self, count: int) -> None:
        wanted = self.asked + count
        while self.asked < wanted:
            await asyncio.sleep(LOOK_S)


async def test_the_limit_follows_the_engine_and_wakes_who_waits() -> None:
    engine = Engine()
    assert engine.slots.limit == START_LIMIT
    engine.room = 0
    async with engine.looked_at():
        engine.fill()
        await engine.looks(20)
        assert engine.slots.limit == MOST
        assert engine.room >= 4
        engine.rank = {"token_usage": 0.99}
        await engine.looks(5)
        assert engine.slots.limit < MOST


async def test_it_begins_where_the_server_says_and_keeps_what_was_found() -> None:
    engine = Engine()
    engine.room = 0
    size = ServerSize(running=256, graph=256, tokens=600_000)
    engine.adaptive.learn(size)
    assert engine.slots.limit == size.start(None) == 268
    assert engine.room == 1
    async with engine.looked_at():
        engine.fill()
        engine.rank = {"token_usage": 0.99}
        await engine.looks(5)
        found = engine.slots.limit
        assert found < 268
    # its next life is of the same size
    engine.adaptive.learn(size)
    assert engine.slots.limit == found
    engine.adaptive.learn(ServerSize(running=64, graph=64))
    assert engine.slots.limit == 67
    assert Engine(most=48).slots.limit == START_LIMIT
    bounded = Engine(most=48)
    bounded.adaptive.learn(size)
    assert bounded.slots.limit == 48


async def test_an_idle_engine_is_not_asked() -> None:
    engine = Engine()
    async with engine.looked_at():
        await asyncio.sleep(20 * LOOK_S)
        assert engine.asked == 0
        engine.fill()
        await engine.looks(3)
        engine.filling = False
        engine.empty()
        asked = engine.asked
        await asyncio.sleep(20 * LOOK_S)
        assert engine.asked <= asked + 1


async def test_what_was_found_outlives_the_server() -> None:
    engine = Engine(most=200)
    async with engine.looked_at():
        engine.fill()
        await engine.looks(20)
        assert engine.slots.limit == 200
    engine.empty()
    async with engine.looked_at():
        await asyncio.sleep(5 * LOOK_S)
        assert engine.slots.limit == 200


@pytest.mark.parametrize("error", [EngineUnreachable("gone"), EngineRejected("HTTP 404")])
async def test_a_server_that_does_not_tell_is_judged_by_its_answers(error: Exception) -> None:
    engine = Engine()
    engine.error = error
    async with engine.looked_at():
        engine.fill()
        await engine.looks(1)
        for _ in range(2000):
            await asyncio.sleep(LOOK_S / 4)
            engine.fill()
            for _ in range(engine.slots.in_flight):
                engine.adaptive.note_tokens(10)
            if engine.slots.limit > START_LIMIT:
                break
        assert engine.slots.limit > START_LIMIT
        assert (engine.asked == 1) is isinstance(error, EngineRejected)


async def test_people_see_the_load_while_the_engine_works_and_nothing_of_an_idle_one() -> None:
    engine = Engine()
    async with engine.looked_at():
        engine.fill()
        engine.rank = {"token_usage": 0.5, "num_waiting_reqs": 3}
        await engine.looks(3)
        load = engine.load()
        assert load is not None
        assert (load.token_usage, load.waiting) == (0.5, 3)
        assert engine.adaptive.meter.tokens_per_s is not None
        engine.filling = False
        engine.empty()
        async with asyncio.timeout(30):
            while engine.load() is not None:
                await asyncio.sleep(LOOK_S)
        engine.filling = True
        engine.fill()
        await engine.looks(3)
        assert engine.load() is not None
    assert engine.load() is None
