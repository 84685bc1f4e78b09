"""Requests through the fleet, against fake engines: void answers, deadlines, dead engines."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from fleet_rig import directory_of, fleet, texts

from evald.errors import GenerationFailed, Unhealthy
from evald.postures.contract import GenerateRequest
from evald.testing import FakeEngine, Fault
from evald.testing.fake_engine import prompt_logprob

UPDATE = "/update_weights_from_disk"
NAN_BF16 = b"\xc0\x7f"


pytestmark = pytest.mark.usefixtures("quick_engines")


async def test_dead_engine_is_restarted_pinned_again_and_requests_survive(base: Path) -> None:
    async with fleet(base, delay_s=0.2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        first = dict(pin.weight_versions)
        asking = [asyncio.create_task(rig.ask(pin, samples=2)) for _ in range(4)]
        await rig.until(lambda: rig.engine().slots.in_flight == 8)
        rig.fake().die()
        answers = [answer for group in await asyncio.gather(*asking) for answer in group]
        assert texts(answers) == [r"\boxed{1}"] * 8
        assert pin.weight_versions != first  # a fresh label, of the same digest
        assert {a.weight_version for a in answers} == set(pin.weight_versions.values())
        assert rig.posture.engines()[0].restarts == 1


async def test_frozen_engine_loses_its_requests_as_soon_as_that_is_known(base: Path) -> None:
    async with fleet(
        base, engines=2, probe_interval_s=0.3, probe_timeout_s=0.2, probe_failures=3
    ) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: len(pin.weight_versions) == 2)
        rig.fake(0).freeze()
        loop = asyncio.get_running_loop()
        began = loop.time()
        # far beyond what it takes: nobody waits for the samples' own deadline
        asking = [asyncio.create_task(rig.ask(pin, samples=2, timeout_s=60.0)) for _ in range(6)]
        await rig.until(lambda: rig.engine(0).slots.in_flight > 0)
        answers = [answer for group in await asyncio.gather(*asking) for answer in group]
        assert texts(answers) == [r"\boxed{1}"] * 12
        assert {a.engine for a in answers} == {"engine-1"}
        # one interval, and as many probes as it takes, one right after the other
        assert 0.6 <= loop.time() - began < 1.5
        await rig.until(lambda: len(pin.weight_versions) == 2 and rig.engine(0).alive)
        assert len(rig.launchers[0].engines) == 2
        assert rig.posture.engines()[0].restarts == 1


async def test_a_question_that_kills_engines_costs_itself_only(base: Path) -> None:
    def configure(fake: FakeEngine) -> None:
        # its prompt is what no other has
        fake.poison = [6, 6, 6]

    async with fleet(base, engines=2, configure=configure, delay_s=0.1) as rig:
        pin = await rig.posture.pin(rig.target(1))
        poison = GenerateRequest(
            prompts=[[6, 6, 6]], sampling=[{"max_new_tokens": 32}], rid="poison", timeout_s=20.0
        )
        asking = [asyncio.create_task(rig.ask(pin, samples=2, timeout_s=20.0)) for _ in range(6)]
        with pytest.raises(GenerationFailed, match="3 engines died while they answered") as caught:
            await rig.posture.generate(pin, poison)
        assert caught.value.kind == "error"
        answers = [answer for group in await asyncio.gather(*asking) for answer in group]
        assert texts(answers) == [r"\boxed{1}"] * 12
        assert sum(view.restarts for view in rig.posture.engines()) == 3
        assert [rig.engine(index).slots.in_flight for index in range(2)] == [0, 0]


async def test_drain_lets_requests_finish_before_the_next_pin(base: Path) -> None:
    async with fleet(base, delay_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        await rig.posture.unpin(pin)
        second = await rig.posture.pin(rig.target(2))
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await asking  # it was not aborted, but its point has ended
        assert rig.fake().aborted == []
        assert texts(await rig.ask(second)) == [r"\boxed{2}"]
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await rig.ask(pin)


async def test_drain_deadline_aborts_what_runs(base: Path) -> None:
    async with fleet(base, drain_timeout_s=0.1) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: len(rig.fake()._running) == 1)
        rig.fake().delay_s = 0.0
        # (the running request keeps its 30 s)
        await rig.posture.unpin(pin)
        second = await rig.posture.pin(rig.target(2))
        assert len(rig.fake().aborted) == 1
        assert texts(await rig.ask(second)) == [r"\boxed{2}"]
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await asking


async def test_an_answer_that_comes_after_the_point_has_ended_never_counts(base: Path) -> None:
    async with fleet(base, delay_s=0.2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: rig.engine().slots.in_flight == 1)
        await rig.posture.unpin(pin)
        with pytest.raises(GenerationFailed, match="the point has ended"):
            await asking
        assert rig.fake().aborted == []  # it was a late answer, not a lost one


@pytest.mark.parametrize(
    "fault", [Fault.ABORT, Fault.BUSY, Fault.DROP, Fault.FAIL, Fault.WRONG_RID]
)
async def test_void_answers_are_asked_again(base: Path, fault: Fault) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", fault, fault)
        assert texts(await rig.ask(pin, samples=2)) == [r"\boxed{1}"] * 2


async def test_retry_prefers_another_engine(base: Path) -> None:
    async with fleet(base, engines=2) as rig:
        pin = await rig.posture.pin(rig.target(1))
        await rig.until(lambda: len(pin.weight_versions) == 2)
        rig.fake(0).script("/generate", *[Fault.BUSY] * 5)
        answers = await rig.ask(pin)
        assert answers[0].engine == "engine-1"


async def test_answer_of_other_weights_is_void_and_the_engine_restarted(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", Fault.WRONG_LABEL)
        answers = await rig.ask(pin)
        assert texts(answers) == [r"\boxed{1}"]
        assert len(rig.launchers[0].engines) == 2
        assert rig.posture.engines()[0].restarts == 1


async def test_rejected_request_is_the_samples_fault(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", Fault.REJECT)
        with pytest.raises(GenerationFailed, match="HTTP 400") as caught:
            await rig.ask(pin)
        assert caught.value.kind == "rejected"
        assert rig.posture.engines()[0].state == "serving"


async def test_request_fails_after_three_errors(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", *[Fault.FAIL] * 3)
        with pytest.raises(GenerationFailed, match="HTTP 500") as caught:
            await rig.ask(pin)
        assert caught.value.kind == "error"


async def test_timeout_aborts_the_samples_at_the_engine(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        with pytest.raises(GenerationFailed, match=r"no complete answer within 0\.2 s") as caught:
            await rig.ask(pin, samples=2, timeout_s=0.2)
        assert caught.value.kind == "timeout"
        assert str(caught.value).endswith("last: engine-0 was still answering")
        await rig.until(lambda: len(rig.fake().aborted) == 2)
        assert rig.engine().slots.in_flight == 0


async def test_cancelled_request_is_aborted_too(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().delay_s = 30.0
        asking = asyncio.create_task(rig.ask(pin))
        await rig.until(lambda: bool(rig.fake()._running))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await rig.until(lambda: len(rig.fake().aborted) == 1)


async def test_in_flight_is_bounded_for_each_engine(base: Path) -> None:
    async with fleet(base, delay_s=0.05, max_requests=4) as rig:
        pin = await rig.posture.pin(rig.target(1))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, rig.engine().slots.in_flight)
                await asyncio.sleep(0.005)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*[rig.ask(pin, samples=2) for _ in range(8)])
        assert most == 4
        assert len(await rig.ask(pin, samples=9)) == 9  # larger than the limit: alone
        watcher.cancel()


async def test_requests_give_up_when_no_engine_serves_any_more(base: Path) -> None:
    async with fleet(base, alive_timeout_s=0.3) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.launchers[0]._configure = lambda fake: fake.script(
            "/health_generate", *[Fault.BUSY] * 999
        )
        rig.fake().die()
        with pytest.raises(Unhealthy, match=r"no engine has served the snapshot for 0\.3 s"):
            await rig.ask(pin)


async def test_requests_give_up_when_the_snapshot_has_vanished_too(base: Path) -> None:
    async with fleet(base) as rig:
        target = rig.target(1)
        pin = await rig.posture.pin(target)
        shutil.rmtree(directory_of(target))
        rig.fake().die()
        with pytest.raises(Unhealthy, match="vanished"):
            await rig.ask(pin)


def scoring(prompts: list[list[int]], starts: list[int]) -> GenerateRequest:
    sampling = [{"max_new_tokens": 0, "temperature": 0.0}] * len(prompts)
    return GenerateRequest(
        prompts=prompts, sampling=sampling, score_from=starts, rid="score", timeout_s=10.0
    )


async def test_prompts_are_scored(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        prompts = [[1, 2, 3, 4], [5, 6]]
        first, second = await rig.posture.generate(pin, scoring(prompts, [2, 1]))
        assert first.prompt_logprobs == [prompt_logprob(3), prompt_logprob(4)]
        assert second.prompt_logprobs == [prompt_logprob(6)]
        assert (first.text, first.output_ids) == ("", [])


async def test_a_likelihood_that_is_no_number_is_no_answer(base: Path) -> None:
    async with fleet(base) as rig:
        pin = await rig.posture.pin(rig.target(1))
        rig.fake().script("/generate", *[Fault.NAN] * 3)
        with pytest.raises(GenerationFailed, match="the weights may hold NaN") as caught:
            await rig.posture.generate(pin, scoring([[1, 2, 3]], [1]))
        assert caught.value.kind == "error"
