"""How many engines of a fleet load their program at a time."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest

from evald.engines import start_gate
from evald.engines.start_gate import Place, StartGate, places_for


async def entered(gate: StartGate, stack: AsyncExitStack, *, again: bool = False) -> Place | None:
    """Enter; None when there is no place now."""
    try:
        async with asyncio.timeout(0.05):
            return await stack.enter_async_context(gate.place("engine-0", again=again))
    except TimeoutError:
        return None


async def test_no_more_than_the_places_until_one_leaves() -> None:
    gate = StartGate(2)
    async with AsyncExitStack() as stack:
        first = await entered(gate, stack)
        assert first
        assert await entered(gate, stack)
        assert not await entered(gate, stack)
        first.leave()
        first.leave()  # gives back one place, not two
        assert await entered(gate, stack)
        assert not await entered(gate, stack)
    async with AsyncExitStack() as stack:  # the blocks have given back the rest
        assert await entered(gate, stack)
        assert await entered(gate, stack)
        assert not await entered(gate, stack)


async def test_a_restart_is_never_behind_a_first_start() -> None:
    gate = StartGate(1)
    async with AsyncExitStack() as stack:
        assert await entered(gate, stack)
        assert await entered(gate, stack, again=True)
        assert not await entered(gate, stack, again=True)


async def test_nobody_keeps_a_place_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_gate, "HOLD_S", 0.01)
    gate = StartGate(1)
    async with AsyncExitStack() as stack:
        assert await entered(gate, stack)
        assert await entered(gate, stack)


async def test_without_a_number_there_is_no_limit() -> None:
    gate = StartGate()
    async with AsyncExitStack() as stack:
        for _ in range(100):
            assert await entered(gate, stack)


def test_one_may_always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert [places_for(processes) for processes in (1, 2, 3, 9)] == [9, 5, 3, 1]
