"""EngineAPI against a fake server: every answer becomes a value or one of four errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from evald.engines import api as api_module
from evald.engines.api import (
    EngineAPI,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnreachable,
)
from evald.engines.pin import PinFailed, drain
from evald.engines.slots import Slots
from evald.testing import FakeLauncher, Fault, write_base_model, write_snapshot


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[FakeLauncher]:
    launcher = FakeLauncher(write_base_model(tmp_path / "base", answer=3))
    yield launcher
    for process in launcher.processes:
        await process.stop(0.0)


@pytest.fixture
async def api(launcher: FakeLauncher) -> AsyncIterator[EngineAPI]:
    launched = await launcher.launch(1)
    api = EngineAPI(launched.url, launched.api_key, limit=4)
    yield api
    await api.close()


async def test_control_calls(api: EngineAPI, launcher: FakeLauncher, tmp_path: Path) -> None:
    await api.health_generate(5.0)
    assert (await api.model_info())["weight_version"].startswith("launch-1-")
    assert (await api.server_info())["version"] == "fake"
    assert (await api.loads())["loads"][0]["num_running_reqs"] == 0
    before = await api.weights_checksum(5.0)
    directory = write_snapshot(tmp_path / "step_1", answer=4, shards=3)
    await api.update_weights(str(directory), "v1", "auto", 5.0)
    assert (await api.model_info())["weight_version"] == "v1"
    assert await api.weights_checksum(5.0) != before
    assert launcher.engines[0].answer == r"\boxed{4}"
    await api.flush_cache()
    await api.abort()
    await api.abort("not-there/")


async def test_generate(api: EngineAPI) -> None:
    sampling = [{"max_new_tokens": 4}, {"max_new_tokens": 64}]
    answers = await api.generate([[1], [2]], sampling, ["a/", "b/"], timeout_s=5.0, logprobs=True)
    assert [answer.text for answer in answers] == [r"\box", r"\boxed{3}"]
    assert [answer.reason for answer in answers] == ["length", "stop"]
    assert answers[0].logprobs == [-0.5] * 4


async def test_detokenize(api: EngineAPI, launcher: FakeLauncher) -> None:
    ids = [list(b"so"), list("é".encode())]
    assert await api.detokenize(ids, skip_special_tokens=True) == ["so", "é"]
    launcher.engines[0].script("/detokenize", Fault.REJECT)
    with pytest.raises(EngineRejected):
        await api.detokenize(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.BUSY, EngineBusy),
        (Fault.REJECT, EngineRejected),
        (Fault.FAIL, EngineError),
        (Fault.DROP, EngineUnreachable),
        (Fault.DIE, EngineUnreachable),
        (Fault.HANG, EngineUnreachable),
    ],
)
async def test_faults_become_errors(
    api: EngineAPI, launcher: FakeLauncher, fault: Fault, error: type[EngineError]
) -> None:
    # twice: the client itself repeats a GET whose connection was dropped
    launcher.engines[0].script("/health_generate", fault, fault)
    with pytest.raises(EngineError, match=r"^health_generate: ") as caught:
        await api.health_generate(0.2)
    assert type(caught.value) is error


async def test_a_wrong_key_is_rejected(launcher: FakeLauncher) -> None:
    launched = await launcher.launch(1)
    api = EngineAPI(launched.url, None, limit=4)
    with pytest.raises(EngineRejected, match="HTTP 401: Unauthorized"):
        await api.model_info()
    await api.close()


async def test_nobody_listens(api: EngineAPI, launcher: FakeLauncher) -> None:
    launcher.processes[0].kill()
    with pytest.raises(EngineUnreachable, match="connection failed"):
        await api.model_info()
    busy = Slots(1)
    busy.enter(1)
    with pytest.raises(PinFailed, match="drain: cannot abort running requests"):
        await drain(api, busy, 0.01, owned=True)


@pytest.fixture
async def odd() -> AsyncIterator[tuple[EngineAPI, list[Any]]]:
    """A server that answers every request with the next of some JSON values."""
    answers: list[Any] = []

    async def answer(_request: web.Request) -> web.Response:
        value = answers.pop(0)
        return web.Response(body=value) if isinstance(value, bytes) else web.json_response(value)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = EngineAPI(f"http://127.0.0.1:{runner.addresses[0][1]}", None, limit=4)
    yield api, answers
    await api.close()
    await runner.cleanup()


async def test_success_is_never_taken_from_the_status_alone(
    odd: tuple[EngineAPI, list[Any]],
) -> None:
    api, answers = odd
    answers += [
        {"success": False, "message": "no"},
        [],
        b"<html>",
        {"success": True},
        {},
        [{"meta_info": {}}],
        [1],
        b"[" * 100_000,
    ]
    with pytest.raises(EngineError, match="update_weights_from_disk: no"):
        await api.update_weights("/x", "v", "auto", 5.0)
    with pytest.raises(EngineError, match="a JSON object expected"):
        await api.model_info()
    with pytest.raises(EngineError, match="a JSON object expected, got '<html>'"):
        await api.model_info()
    with pytest.raises(EngineError, match="weights_checker: no checksum"):
        await api.weights_checksum(5.0)
    for rids, fault in (
        (["a/"], "Expected `array`, got `object`"),
        (["a/", "b/"], "2 answers expected, got 1"),
        (["a/"], "Expected `object`, got `int`"),
    ):
        with pytest.raises(EngineError, match=f"generate: {fault}"):
            await api.generate([[1]], [{}], rids, timeout_s=5.0)
    with pytest.raises(EngineError, match="model_info: a JSON object expected"):
        await api.model_info()


@pytest.fixture
async def endless() -> AsyncIterator[str]:
    """A server whose answers never end: a byte now and then, or as fast as they are read."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        slow = request.path == "/health_generate"
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" if slow else b"x" * 65536)
                await asyncio.sleep(0.02 if slow else 0)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_answers_without_an_end_are_given_up(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "MAX_ANSWER_BYTES", 1 << 20)
    api = EngineAPI(endless, None, limit=4)
    with pytest.raises(EngineUnreachable, match=r"health_generate: no answer within 0\.2 s"):
        await api.health_generate(0.2)
    with pytest.raises(EngineError, match="larger than 1048576 bytes"):
        await api.weights_checksum(10.0)
    await api.close()


async def test_a_deadline_holds_while_all_connections_are_taken(launcher: FakeLauncher) -> None:
    launched = await launcher.launch(1)
    launcher.engines[0].delay_s = 30.0
    api = EngineAPI(launched.url, launched.api_key, limit=1 - api_module.CONTROL_CONNECTIONS)
    asking = asyncio.create_task(api.generate([[1]], [{}], ["a/"], timeout_s=20.0))
    while not launcher.engines[0]._running:
        await asyncio.sleep(0.01)
    with pytest.raises(EngineUnreachable, match=r"health_generate: no answer within 0\.2 s"):
        await api.health_generate(0.2)
    asking.cancel()
    await asyncio.wait({asking})
    await api.close()


async def test_answers_come_whole() -> None:
    """A stream of tokens takes twenty times the CPU, here and in the server."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response([])

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = EngineAPI(f"http://127.0.0.1:{runner.addresses[0][1]}", None, limit=4)
    with pytest.raises(EngineError, match="1 answers expected, got 0"):
        await api.generate([[1]], [{}], ["a/"], timeout_s=5.0)
    await api.close()
    await runner.cleanup()
    assert [body.get("stream", False) for body in bodies] == [False]
