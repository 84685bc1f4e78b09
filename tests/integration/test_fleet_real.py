"""The fleet on real SGLang in CPU mode: one engine, one snapshot after another on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from export_rig import TwoRanks

from evald.config import Fleet
from evald.engines.prepare import prepare_fleet
from evald.point import PinTarget
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.postures.engine_pool import EnginePool
from evald.postures.fleet import fleet_engines
from evald.testing import write_base_model, write_snapshot

#: questions of the comparison, as token ids.
QUESTIONS = [[10, 20, 30], [40, 50, 60, 70], [80, 90]]
#: never the tokens that the model has beyond its tokenizer.
NONE = {str(token): -1e4 for token in range(256, 320)}
_rids = itertools.count()
# one engine for the module, so one event loop, too
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


def _target(root: Path, step: int, *, seed: int | None = None) -> PinTarget:
    directory = write_snapshot(root / f"step_{step}", seed=step if seed is None else seed, answer=1)
    return PinTarget(run="demo", step=step, digest=f"{step:032x}"[::-1], directory=directory)


async def _answers(posture: EnginePool, pin: Pin) -> list[list[int]]:
    """Greedy answers, one request at a time: the batch must not change a bit."""
    return [(await _ask(posture, pin, ids))[0].output_ids for ids in QUESTIONS]


async def _ask(posture: EnginePool, pin: Pin, ids: list[int], samples: int = 1) -> list[Generation]:
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    request = GenerateRequest(
        prompts=[ids] * samples,
        sampling=[sampling] * samples,
        rid=f"q{next(_rids)}",
        timeout_s=60.0,
    )
    return await posture.generate(pin, request)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def posture(root: Path) -> AsyncIterator[EnginePool]:
    config = Fleet(
        model=str(write_base_model(root / "base")),
        device="cpu",
        engines=1,
        start_timeout_s=110.0,
        load_timeout_s=60.0,
        alive_timeout_s=110.0,
        fast_pin="on",
    )
    plan = prepare_fleet(config, environ=os.environ)
    posture = fleet_engines(config, root / "results", plan=plan)
    task = asyncio.create_task(posture.run(), name="fleet")
    yield posture
    pid = posture.engines()[0].pid
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_then_b_then_a_answers_follow_the_weights(posture: EnginePool, root: Path) -> None:
    a, b = _target(root, 1), _target(root, 2)
    versions, answers = [], []
    for target in (a, b, a):  # that A's checksum is the same both times is part of its second pin
        pin = await posture.pin(target)
        answers.append(await _answers(posture, pin))
        versions.append(pin.weight_versions["engine-0"])
        assert posture.capacity(pin) >= 128  # what the server was started for, at once
        await posture.unpin(pin)
    assert answers[0] != answers[1]
    assert answers[2] == answers[0]
    assert len(set(versions)) == 3
    assert versions[0].startswith(f"demo:1:{a.digest[:8]}:")
    assert versions[1].startswith(f"demo:2:{b.digest[:8]}:")
    assert pin.sglang_version == "0.5.23"
    # and each of these loads, which begins with SGLang's own, was by evald's own loader
    loading = posture._engines[0].upkeep.loading
    assert loading is not None
    assert loading.fast.on
    assert posture.capacity(pin) == 1  # nothing is pinned any more


async def test_what_two_fsdp2_ranks_exported_answers_as_in_transformers(
    posture: EnginePool, two_ranks: TwoRanks
) -> None:
    directory = two_ranks.root / "step_2"
    pin = await posture.pin(PinTarget(run="t", step=2, digest="f" * 32, directory=directory))
    for row in two_ranks.reference:
        tokens = len(row["answer"])
        request = GenerateRequest(
            prompts=[row["prompt"]],
            sampling=[{"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}],
            score_from=[1],
            rid=f"q{next(_rids)}",
            timeout_s=60.0,
        )
        [generation] = await posture.generate(pin, request)
        assert generation.output_ids == row["answer"]
        assert generation.prompt_logprobs == pytest.approx(row["prompt_logprobs"], abs=0.05)
    await posture.unpin(pin)


async def _whole(posture: EnginePool, pin: Pin, ids: list[int], moves: int) -> Generation:
    """Ask for a long answer, and move it so many times (with one engine: back to where it was)."""
    sampling = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True, "logit_bias": NONE}
    request = GenerateRequest(
        prompts=[ids], sampling=[sampling], rid=f"q{next(_rids)}", timeout_s=60.0
    )
    asking = asyncio.create_task(posture.generate(pin, request))
    router, [engine] = posture._router, posture._engines
    campaign = posture._campaigns.of_pin(pin)
    assert campaign
    for number in range(1, moves + 1):
        # the moment it is sent, too: the server may not know it yet when the abort comes
        while not (api := engine.connected_api()).running_rids:
            await asyncio.sleep(0)
        if number > 1:  # let it get somewhere
            await asyncio.sleep(0.2)
        assert router.movable(campaign, engine)
        assert router.move(campaign, engine) == router.in_flight(campaign, engine) == 1
        [rid] = api.running_rids
        while rid in api.running_rids:
            await asyncio.sleep(0.001)
    return (await asking)[0]


async def test_a_moved_answer_is_the_unmoved_one(posture: EnginePool, root: Path) -> None:
    pin = await posture.pin(_target(root, 4))
    moved = []
    for ids in QUESTIONS[:2]:
        unmoved, answer = [await _whole(posture, pin, ids, moves) for moves in (0, 2)]
        assert answer.output_ids == unmoved.output_ids
        assert answer.text == unmoved.text
        assert (answer.finish_reason, unmoved.finish_reason) == ("length", "length")
        assert unmoved.pieces == ()
        assert sum(piece.tokens for piece in answer.pieces) in {0, 200}
        moved.append(len(answer.pieces))
    assert max(moved) >= 2
    await posture.unpin(pin)
