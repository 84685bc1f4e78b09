"""Samples move between fake engines that decode token by token, over HTTP."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from fleet_rig import Rig, fleet

from evald.postures.campaign import Campaign
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.testing import Decode, FakeLauncher

pytestmark = pytest.mark.usefixtures("quick_engines")
#: most responses take half a second.
DECODE = Decode(step_s=0.001, slots=32, median_tokens=400, p99_tokens=1500)
QUESTIONS, SAMPLES = 8, 3


def decode_slowly(launcher: FakeLauncher, _index: int) -> None:
    launcher._decode = DECODE


async def ask_all(rig: Rig, pin: Pin, attempt: int) -> list[list[Generation]]:
    """Ask as an eval set does, some in lists."""
    requests = [
        GenerateRequest(
            prompts=[[40 + number, 50]] * SAMPLES,
            sampling=[
                {"temperature": 1.0, "max_new_tokens": 1000, "sampling_seed": seed}
                for seed in range(SAMPLES)
            ],
            rid=f"evald-{attempt}-{number}",
            timeout_s=60.0,
        )
        for number in range(QUESTIONS)
    ]
    return await asyncio.gather(*[rig.posture.generate(pin, one) for one in requests])


def campaign_of(rig: Rig, pin: Pin) -> Campaign:
    campaign = rig.posture._campaigns.of_pin(pin)
    assert campaign
    return campaign


async def move_about(rig: Rig, campaign: Campaign, moved: set[int]) -> None:
    """Free one engine after the other, whatever it has in flight."""
    chance = random.Random(1)  # noqa: S311 - no secret
    while True:
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        number = chance.randrange(3)
        if rig.posture._router.move(campaign, rig.engine(number)):
            moved.add(number)


@pytest.mark.parametrize("killed", [False, True])
async def test_answers_are_the_unmoved_ones(base: Path, killed: bool) -> None:
    async with fleet(base, 3, prepare=decode_slowly) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: len(pin.weight_versions) == 3)
        expected = await ask_all(rig, pin, 1)
        assert not any(one.pieces for answers in expected for one in answers)

        moved: set[int] = set()
        campaign = campaign_of(rig, pin)
        mover = asyncio.create_task(move_about(rig, campaign, moved))
        asking = asyncio.create_task(ask_all(rig, pin, 2))
        if killed:
            await rig.until(lambda: len(moved) == 3)
            rig.fake(2).die()
        answers = await asking
        mover.cancel()
        for one, other in zip(expected, answers, strict=True):
            for unmoved, now in zip(one, other, strict=True):
                assert (now.output_ids, now.text) == (unmoved.output_ids, unmoved.text)
                assert now.finish_reason == unmoved.finish_reason
                assert {piece.weight_version for piece in now.pieces} <= campaign.versions
                tokens = sum(piece.tokens for piece in now.pieces)
                assert tokens in {0, len(now.output_ids)}
        assert sum(bool(one.pieces) for other in answers for one in other) > QUESTIONS
        fakes = [fake for launcher in rig.launchers for fake in launcher.engines]
        # no engine went on with what other weights, or another sample, had begun
        assert sum(fake.usage().get("foreign", 0) for fake in fakes) == 0
        await rig.posture.unpin(pin)
