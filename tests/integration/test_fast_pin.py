"""Evald's own loader in the engines: when it is used, and when it is given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fleet_rig import Rig, directory_of, fleet, texts

from evald.engines.fast_pin import FAST, PLAIN
from evald.errors import PinViolation
from evald.testing import FakeEngine, Fault

UPDATE = "/update_weights_from_disk"
GB = 1_000_000_000
#: what the test at the first start asks for.
TESTED = [PLAIN, FAST, FAST]

pytestmark = pytest.mark.usefixtures("quick_engines")


def with_plugin(
    fast_s: float | None = 0.0, free: list[int] | None = None
) -> Callable[[FakeEngine], None]:
    """The plugin in the first life of an engine, and in each one after it."""

    def configure(fake: FakeEngine) -> None:
        fake.fast_load_s, fake.free_bytes = fast_s, list(free or [])

    return configure


def formats(rig: Rig, index: int = 0) -> list[list[str]]:
    """By which loader an engine was updated, in each of its lives."""
    return [
        [str(update["load_format"]) for update in fake.updates]
        for fake in rig.launchers[index].engines
    ]


async def pin(rig: Rig, step: int) -> None:
    pin = await rig.posture.pin(rig.target(step))
    assert texts(await rig.ask(pin)) == [rf"\boxed{{{step}}}"]
    await rig.posture.unpin(pin)


async def test_loader_that_is_right_is_used_from_the_first_pin_on(base: Path) -> None:
    configure = with_plugin(free=[40 * GB])
    async with fleet(base, 2, update_test=True, configure=configure, fast_pin="on") as rig:
        found = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: len(found.weight_versions) == 2)
        assert sorted([formats(rig, 0), formats(rig, 1)], key=str) == [
            [[*TESTED, FAST]],  # one test for the group
            [[FAST]],
        ]


@pytest.mark.parametrize(
    ("configure", "why", "tries"),
    [
        (with_plugin(None), "the engine did not use it", [PLAIN, FAST]),
        (with_plugin(free=[40 * GB, 40 * GB, 32 * GB]), "lost 8.0 GB of memory", TESTED),
    ],
    ids=["no plugin", "leak"],
)
async def test_loader_that_is_not_right_is_not_used_and_says_why(
    base: Path,
    configure: Callable[[FakeEngine], None],
    why: str,
    tries: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet(base, update_test=True, configure=configure, fast_pin="on") as rig:
        await pin(rig, 1)
        # what the test has left behind is overwritten
        assert formats(rig) == [[*tries, PLAIN, PLAIN]]
    [line] = [line for line in capsys.readouterr().out.splitlines() if "fast_pin " in line]
    assert why in line


async def test_engine_that_dies_in_the_test_of_the_loader_is_started_again(base: Path) -> None:
    lives = 0

    def die_at_the_fast_one(fake: FakeEngine) -> None:
        nonlocal lives
        lives += 1
        fake.fast_load_s = 0.0
        if lives == 1:
            fake.script(UPDATE, Fault.LABEL_ONLY, Fault.DIE)

    async with fleet(base, update_test=True, configure=die_at_the_fast_one, fast_pin="on") as rig:
        await pin(rig, 1)
        assert formats(rig)[1:] == [[PLAIN]]
        assert rig.posture.engines()[0].restarts == 0


async def test_failure_that_sglangs_own_loader_has_not_ends_it(base: Path) -> None:
    async with fleet(base, update_test=True, configure=with_plugin(), fast_pin="on") as rig:
        rig.fake().script(UPDATE, Fault.DIE)
        await pin(rig, 1)
        await pin(rig, 2)
        assert formats(rig) == [TESTED, [PLAIN, PLAIN]]  # (a request that kills is not noted)


async def test_bad_snapshot_does_not_end_it(base: Path) -> None:
    async with fleet(base, update_test=True, configure=with_plugin(), fast_pin="on") as rig:
        bad = rig.target(1)
        shard = directory_of(bad) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(PinViolation, match="2 attempts failed"):
            await rig.posture.pin(bad)
        await pin(rig, 2)
        assert formats(rig) == [[*TESTED, FAST], [PLAIN], [FAST]]


async def test_engine_that_loses_memory_is_started_again_before_its_next_pin(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = [40 * GB] * 4 + [32 * GB]  # three updates of the test, the first pin, the second
    configure = with_plugin(free=free)
    async with fleet(base, update_test=True, configure=configure, fast_pin="on") as rig:
        await pin(rig, 1)
        await pin(rig, 2)
        await pin(rig, 3)
        assert formats(rig) == [[*TESTED, FAST, FAST], [PLAIN]]
        assert rig.posture.engines()[0].restarts == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "pin_memory_leak" in line]
    assert "40.0 GB of memory left after its first pin and has 32.0 GB now" in line
