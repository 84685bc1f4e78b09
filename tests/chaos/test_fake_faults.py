"""The fake engine's own faults do what their names say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from evald.testing import FakeEngine, serve_fake, write_base_model
from evald.testing.fake_engine import varied

BODY = {"input_ids": [[1, 2, 3]], "sampling_params": [{"max_new_tokens": 20}], "rid": ["a"]}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    model = write_base_model(tmp_path / "base", answer=5)
    engine = FakeEngine(model, vary=4, fault_file=tmp_path / "faults")
    server = await serve_fake(engine)
    yield server.url
    await server.process.stop(0)


def script(tmp_path: Path, *names: str) -> None:
    (tmp_path / "new").write_text(json.dumps({"/generate": names}))
    (tmp_path / "new").rename(tmp_path / "faults")


async def ask(url: str, **more: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=BODY | more) as answer,
    ):
        return answer.status, await answer.json()


async def test_an_answer_depends_on_weights_and_prompt(url: str) -> None:
    _, answers = await ask(url)
    assert answers[0]["text"] == f"\\boxed{{{varied(5, [1, 2, 3], 4)}}}" == "\\boxed{3}"


async def test_faults_come_from_a_file_and_are_used_up(url: str, tmp_path: Path) -> None:
    script(tmp_path, "too_many", "trickle")
    assert (await ask(url))[0] == 429
    assert (await ask(url))[1][0]["text"] == "\\boxed{3}"
    assert (await ask(url))[1][0]["text"] == "\\boxed{3}"
    assert not (tmp_path / "faults").exists()


async def test_half_an_answer_ends_in_the_middle(url: str, tmp_path: Path) -> None:
    script(tmp_path, "cut")
    with pytest.raises(aiohttp.ClientError):
        await ask(url)


async def test_nan_waits_for_who_looks_at_log_probabilities(url: str, tmp_path: Path) -> None:
    script(tmp_path, "nan")
    assert (await ask(url))[1][0]["text"] == "\\boxed{3}"
    told = (await ask(url, return_logprob=True))[1][0]["meta_info"]
    assert told["output_token_logprobs"][0][0] is None
