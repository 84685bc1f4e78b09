"""The choice of the loader, and the watch over memory."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from evald.engines.api import EngineError
from evald.engines.fast_pin import FAST, PLAIN, FastPin, Loaded, MemoryWatch, Report, read_report

GB = 1_000_000_000


def loaded(
    load_format: str = FAST, *, fast: bool = True, free: int | None = 40 * GB, s: float = 0.1
) -> Loaded:
    return Loaded(load_format=load_format, report=Report(fast=fast, free_bytes=free), update_s=s)


class Engine:
    """Answers updates with what is given, in turn."""

    def __init__(self, *updates: Loaded, checksum: str = "same") -> None:
        self.updates = list(updates)
        self._checksum = checksum

    async def update(self, load_format: str) -> Loaded:
        assert load_format == FAST
        return self.updates.pop(0)

    async def checksum(self) -> str:
        return self._checksum


async def outcome(mode: Literal["auto", "on"], engine: Engine) -> tuple[str, bool]:
    fast = FastPin(mode)
    why = await fast.test(engine, "same", 1.0)
    return why, fast.on


@pytest.mark.parametrize(
    ("message", "report"),
    [
        ("Succeeded to update model weights.", Report(fast=False, free_bytes=None)),
        ("Succeeded. evald_fast_load:", Report(fast=False, free_bytes=None)),
        ("Succeeded. evald_fast_load: 7 bytes free;", Report(fast=False, free_bytes=7)),
        ("evald_fast_load: 9 bytes read; 7 bytes free; Weight version updated to 5 bytes free;",
         Report(fast=True, free_bytes=7)),
        # of data parallel ranks
        ("evald_fast_load: 9 bytes read; 7 bytes free;evald_fast_load: 9 bytes read; 6 bytes free;",
         Report(fast=True, free_bytes=6)),
        ("evald_fast_load: 9 bytes read; | evald_fast_load:", Report(fast=False, free_bytes=None)),
    ],
)  # fmt: skip
def test_what_a_message_says(message: str, report: Report) -> None:
    assert read_report(message) == report


@pytest.mark.parametrize("mode", ["auto", "on"])
async def test_right_fast_and_flat(mode: Any) -> None:
    assert await outcome(mode, Engine(loaded(free=41 * GB, s=2.0), loaded(free=41 * GB))) == (
        "",
        True,
    )


@pytest.mark.parametrize(
    ("second", "why", "on_too"),
    [
        (loaded(fast=False), "did not use it", False),
        (loaded(s=1.0), "it took 1.000 s and SGLang's own loader 1.000 s", True),
        (loaded(free=None), "cannot be told how much memory", True),
        (loaded(free=39 * GB), "one update lost 1.0 GB of memory", False),
    ],
)
async def test_not_right(second: Loaded, why: str, *, on_too: bool) -> None:
    first = loaded(free=second.report.free_bytes and 40 * GB)
    said, on = await outcome("auto", Engine(first, second))
    assert why in said
    assert not on
    assert (await outcome("on", Engine(first, second)))[1] == on_too


async def test_other_weights() -> None:
    said, on = await outcome("on", Engine(loaded(), loaded(), checksum="another one"))
    assert (said, on) == ("its checksum is another one instead of same", False)


API: Any = EngineError("stands for a server: it can be pointed to weakly")


async def running() -> FastPin:
    fast = FastPin("on")
    await fast.test(Engine(loaded(), loaded()), "same", 1.0)
    return fast


async def test_snapshot_that_both_fail_on_is_to_blame() -> None:
    fast = await running()
    assert fast.format("bad", PLAIN) == FAST
    fast.failed("bad")
    assert fast.format("bad", PLAIN) == PLAIN
    fast.failed("bad")
    assert fast.format("bad", PLAIN) == PLAIN
    assert fast.format("next", "mine") == FAST


async def test_snapshot_that_only_the_fast_one_fails_on_ends_it() -> None:
    fast = await running()
    fast.failed("good")
    await fast.worked(API, "other", loaded(), engine="e")
    assert fast.format("next", "mine") == FAST
    await fast.worked(API, "good", loaded(PLAIN, fast=False), engine="e")
    assert fast.format("next", "mine") == "mine"


async def test_another_engine_that_could_load_it_fast_clears_the_loader() -> None:
    fast = await running()
    fast.failed("good")
    await fast.worked(API, "good", loaded(), engine="e1")
    await fast.worked(API, "good", loaded(PLAIN, fast=False), engine="e0")
    assert fast.on


async def test_engine_that_does_not_use_it_ends_it() -> None:
    fast = await running()
    await fast.worked(API, "a", loaded(FAST, fast=False), engine="e")
    assert not fast.on


async def test_leak_ends_it_and_is_told_once() -> None:
    told: list[str] = []

    async def tell(detail: str) -> None:
        told.append(detail)

    fast = FastPin("on", on_leak=tell)
    await fast.test(Engine(loaded(), loaded()), "same", 1.0)
    for free in (40, 39, 40):
        await fast.worked(API, "a", loaded(free=free * GB), engine="e")
    assert (fast.on, fast.leaking(API), told) == (True, "", [])
    for free in (32, 24):
        await fast.worked(API, "a", loaded(free=free * GB), engine="e")
    assert not fast.on
    assert told == [f"engine e: {fast.leaking(API)}"]
    assert "40.0 GB of memory left after its first pin and has 32.0 GB now" in told[0]


def test_little_memory_is_watched_more_closely() -> None:
    watch = MemoryWatch()
    assert not watch.look(None)
    assert not watch.look(2 * GB)
    assert not watch.look(GB + 1)
    assert watch.look(GB - 1)
