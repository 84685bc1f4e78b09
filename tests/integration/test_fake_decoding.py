"""A fake engine that decodes token by token: aborted, continued, counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from evald.engines.answers import Answer
from evald.engines.api import EngineAPI
from evald.testing import Decode, FakeEngine, serve_fake, write_base_model, write_snapshot

#: half a second for each response.
DECODE = Decode(step_s=0.0002, slots=4, median_tokens=2500, p99_tokens=3000)
PROMPT = [40, 50, 60]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"), answer=7)


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[tuple[FakeEngine, EngineAPI]]:
    fake = FakeEngine(model, decode=DECODE, **settings)
    server = await serve_fake(fake)
    api = EngineAPI(server.url, None, limit=64)
    try:
        yield fake, api
    finally:
        await api.close()
        await server.process.stop(1.0)


async def ask(
    api: EngineAPI, prompt: list[int], rid: str, *, limit: int = 5000, seed: int = 1
) -> Answer:
    sampling = {"max_new_tokens": limit, "sampling_seed": seed}
    return (await api.generate([prompt], [sampling], [rid], timeout_s=30.0))[0]


async def until_running(fake: FakeEngine, count: int) -> None:
    async with asyncio.timeout(10):
        while len(fake._running) != count:
            await asyncio.sleep(0.001)


async def test_continued_elsewhere_a_response_ends_in_the_same_tokens(base: Path) -> None:
    async with serving(base) as (first, here), serving(base) as (second, there):
        whole = await ask(here, PROMPT, "a/")
        assert (whole.text or "").endswith("\\boxed{7}")
        pieces: list[int] = []
        for api, fake in ((here, first), (there, second), (here, first)):
            running = asyncio.create_task(ask(api, PROMPT + pieces, "c/"))
            await until_running(fake, 1)
            await asyncio.sleep(0.02)
            await api.abort("c/")
            part = await running
            assert part.reason == "abort"
            assert part.output_ids
            pieces += part.output_ids
        rest = await ask(there, PROMPT + pieces, "d/")
        assert rest.reason == "stop"
        assert pieces + (rest.output_ids or []) == whole.output_ids
        assert first.usage()["foreign"] == second.usage()["foreign"] == 0


async def test_the_cap_cuts_a_response_in_one_piece_or_two(base: Path) -> None:
    async with serving(base) as (_, api):
        whole = await ask(api, PROMPT, "a/", limit=100)
        assert (whole.reason, len(whole.output_ids or [])) == ("length", 100)
        part = (whole.output_ids or [])[:60]
        rest = await ask(api, PROMPT + part, "b/", limit=40)
        assert (rest.reason, part + (rest.output_ids or [])) == ("length", whole.output_ids)


async def test_what_other_weights_have_begun_is_counted(base: Path) -> None:
    async with serving(base) as (fake, api):
        part = (await ask(api, PROMPT, "a/", limit=200)).output_ids or []
        other = write_snapshot(base.parent / "other", answer=8)
        await api.update_weights(str(other), "v2", "auto", 30.0)
        rest = await ask(api, PROMPT + part, "b/")
        assert (rest.text or "").endswith("\\boxed{8}")
        assert fake.usage()["foreign"] == 1


async def test_load_and_usage_are_those_of_the_model(base: Path) -> None:
    async with serving(base) as (fake, api):
        tasks = [asyncio.create_task(ask(api, PROMPT, f"{n}/", seed=n)) for n in range(6)]
        await until_running(fake, 6)
        [load] = (await api.loads())["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (4, 2)
        assert load["gen_throughput"] == pytest.approx(4 / 0.0004)
        assert 0 < load["token_usage"] < 0.01
        for number in (5, 1, 2, 3):
            await api.abort(f"{number}/")
        answers = await asyncio.gather(*tasks)
        assert (answers[5].reason, answers[5].output_ids) == ("abort", [])
        assert [one.reason for one in answers].count("stop") == 2
        usage = (await api.loads())["usage"]
        assert usage["tokens"] == sum(len(one.output_ids or []) for one in answers)
        assert (usage["completed"], usage["aborted"], usage["foreign"]) == (2, 4, 0)
        assert 0 < usage["busy_s"] < usage["slot_s"] <= 4 * usage["busy_s"]
        info = await api.server_info()
        assert info["internal_states"] == [{"effective_max_running_requests_per_dp": 4}]


async def test_requests_wait_for_an_update_that_takes_its_time(base: Path) -> None:
    async with serving(base, load_s=0.3) as (fake, api):
        other = write_snapshot(base.parent / "other", answer=8)
        update = asyncio.create_task(api.update_weights(str(other), "v2", "auto", 30.0))
        async with asyncio.timeout(10):
            while not fake.updates:
                await asyncio.sleep(0.001)
        answer = await ask(api, PROMPT, "a/")
        assert update.done()
        assert answer.versions == {"v2"}
        assert (answer.text or "").endswith("\\boxed{8}")


async def test_tokens_can_be_decoded(base: Path) -> None:
    async with serving(base) as (_, api), aiohttp.ClientSession(api.base_url) as session:
        whole = await ask(api, PROMPT, "a/")
        body = json.dumps({"tokens": whole.output_ids, "skip_special_tokens": True})
        async with session.post("/detokenize", data=body) as answer:
            assert await answer.json() == {"text": whole.text}
