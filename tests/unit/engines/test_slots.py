from __future__ import annotations

import asyncio

import pytest

from evald.engines.slots import Slots


def test_places_and_who_waits_for_them() -> None:
    woken: list[int] = []
    slots = Slots(4, lambda: woken.append(slots.in_flight))
    assert slots.fits(9)  # a larger request has it alone
    slots.enter(3)
    assert slots.fits(1)
    assert not slots.fits(2)
    slots.leave(3)
    assert woken == [0]
    slots.limit = 8
    assert woken == [0, 0]
    slots.limit = 2
    assert woken == [0, 0]
    assert slots.limit == 2


@pytest.mark.parametrize(
    ("limit", "requests", "full"),
    [
        (4, [1, 1, 1], False),
        (4, [1, 1, 1, 1], True),
        (5, [2, 2], True),  # a third of this size would have to wait
        (6, [2, 2], False),
        (2, [8], True),
    ],
)
def test_whether_the_limit_held_requests_back(limit: int, requests: list[int], full: bool) -> None:
    slots = Slots(limit)
    for count in requests:
        slots.enter(count)
    for count in requests:
        slots.leave(count)
    assert slots.take_was_full() is full
    assert slots.take_was_full() is False


def test_full_is_a_state_too() -> None:
    slots = Slots(4)
    for _ in range(4):
        slots.enter(1)
    # long answers: nothing enters or leaves for minutes
    assert [slots.take_was_full() for _ in range(3)] == [True, True, True]
    slots.limit = 8
    assert not slots.take_was_full()


async def test_busy_and_idle() -> None:
    slots = Slots(4)
    assert await slots.wait_idle(1.0)
    busy = asyncio.create_task(slots.wait_busy())
    await asyncio.sleep(0)
    assert not busy.done()
    slots.enter(2)
    await busy
    assert not await slots.wait_idle(0.01)
    slots.leave(2)
    assert await slots.wait_idle(1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await slots.wait_busy()


def test_who_is_told_of_what() -> None:
    told: list[str] = []
    slots = Slots(
        4,
        lambda: told.append("room"),
        on_grown=lambda: told.append("grown"),
        on_idle=lambda: told.append("idle"),
    )
    slots.enter(1)
    slots.enter(2)
    slots.leave(1)
    slots.limit = 3
    assert told == ["room"]
    slots.limit = 5
    assert told == ["room", "room", "grown"]
    slots.leave(2)
    assert told[3:] == ["room", "idle"]
