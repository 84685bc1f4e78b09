"""Alerts over HTTP: what is posted, what is tried again, and that no secret gets out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from evald.alerts import webhook as module
from evald.alerts.webhook import Poster, Target, webhook_target
from evald.config import Webhook
from evald.errors import ConfigError
from evald.results.records import Alert

PATH = "T0/very-secret-path"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(module, "_TRY_S", 0.5)


class Receiver:
    """Takes what is posted; ``answers`` are statuses to come, 0: hang; then 200."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.requests = 0
        self.taken: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def _take(self, request: web.Request) -> web.Response:
        self.requests += 1
        answer = self.answers.pop(0) if self.answers else 200
        if answer == 0:
            await asyncio.sleep(60)
        if answer >= 300:
            return web.Response(status=answer, headers={"Location": f"{self.url}elsewhere"})
        self.taken.append(json.loads(await request.read()))
        self.headers.append(dict(request.headers))
        return web.Response(status=answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Receiver]:
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", self._take)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/{PATH}"
        try:
            yield self
        finally:
            await runner.cleanup()


@asynccontextmanager
async def posting(url: str, token: str | None = None, **fields: Any) -> AsyncIterator[Poster]:
    config = Webhook(url_env="URL", token_env=None if token is None else "TOKEN", **fields)
    poster = Poster(config, webhook_target(config, {"URL": url, "TOKEN": token or ""}))
    task = asyncio.create_task(poster.run())
    try:
        yield poster
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def alert(name: str = "fell", **fields: Any) -> Alert:
    detail = fields.pop("detail", "it <fell> & fell")
    return Alert(run="a", step=7, record_id=f"a/{name}", name=name, detail=detail, **fields)


async def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def test_what_is_posted() -> None:
    async with Receiver().serving() as r, posting(r.url, "long-random-token") as poster:
        poster.give(alert(subject="eval/x"), time_s=5.0)
        poster.give(alert(subject="eval/x", cleared=True), time_s=6.0)
        await until(lambda: len(r.taken) == 2, "both are taken")
    assert r.taken[0] == {
        "text": "evald a: alert fell: it &lt;fell&gt; &amp; fell",
        "name": "fell",
        "detail": "it <fell> & fell",
        "subject": "eval/x",
        "cleared": False,
        "run": "a",
        "step": 7,
        "revision": 0,
        "record_id": "a/fell",
        "time": 5.0,
    }
    assert r.taken[1]["text"].startswith("evald a: over fell: ")
    assert r.headers[0]["Authorization"] == "Bearer long-random-token"
    assert r.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("answers", "requests", "taken"),
    [
        ((500, 503, 429), 4, 1),  # the fourth try is taken
        ((500, 500, 500, 500), 4, 0),
        ((0, 200), 2, 1),  # one that hangs is given up
        ((404,), 1, 0),  # no other try would go better
        ((307,), 1, 0),  # nor is it followed: the token would go elsewhere
    ],
)
async def test_tries_are_bounded(answers: tuple[int, ...], requests: int, taken: int) -> None:
    with structlog.testing.capture_logs() as logs:
        async with Receiver(*answers).serving() as r, posting(r.url) as poster:
            poster.give(alert("one"), time_s=1.0)
            await until(lambda: r.requests == requests, "it is tried")
            # what follows is posted, whatever became of that one
            poster.give(alert("two"), time_s=2.0)
            await until(lambda: "two" in [one["name"] for one in r.taken], "the next one")
    assert len(r.taken) == taken + 1
    assert r.requests == requests + 1
    failures = [entry["detail"] for entry in logs if entry["event"] == "webhook_failed"]
    assert len(failures) == 1 - taken
    assert PATH not in str(logs)


async def test_a_receiver_that_is_away_is_told_of_once_and_shows_no_secret() -> None:
    async with Receiver().serving() as r:
        url = r.url
    with structlog.testing.capture_logs() as logs:
        async with posting(url, "long-random-token", attempts=2) as poster:
            for number in range(5):
                poster.give(alert(f"n{number}"), time_s=1.0)
            await until(lambda: not poster._waiting, "all were given up")
    failures = [entry for entry in logs if entry["event"] == "webhook_failed"]
    assert len(failures) == 1
    assert failures[0]["detail"] == (
        "cannot post an alert to the webhook: ClientConnectorError; see to the URL and its "
        "receiver: the ledger has all alerts"
    )
    assert PATH not in str(logs)
    assert "long-random" not in str(logs)
    assert PATH not in repr(poster._target)


async def test_all_tries_together_have_a_deadline() -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            Receiver(0, 0, 0, 0).serving() as r,
            posting(r.url, deadline_s=0.2) as poster,
        ):
            poster.give(alert(), time_s=1.0)
            await until(lambda: not poster._waiting, "it was given up")
    [failure] = [entry["detail"] for entry in logs if entry["event"] == "webhook_failed"]
    assert "not taken within 0.2 s" in failure


async def test_what_waits_is_bounded() -> None:
    async with Receiver(0).serving() as r, posting(r.url, attempts=1) as poster:
        for number in range(500):
            poster.give(alert(f"n{number}"), time_s=1.0)
        await until(lambda: r.taken, "one is taken")
        await until(lambda: not poster._waiting, "all are")
    assert [one["name"] for one in r.taken] == [f"n{number}" for number in range(300, 500)][
        -len(r.taken) :
    ]
    assert len(r.taken) >= 199


# --- secrets


def test_secrets_come_from_the_environment_or_closed_files(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("https://hooks.example/services/T0\n")
    file.chmod(0o600)
    name = "T"
    found = webhook_target(Webhook(url_file=str(file), token_env=name), {name: "abc"})
    assert (found.url, found.token) == ("https://hooks.example/services/T0", "abc")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"webhook\.url_file: .*others may read"):
        webhook_target(Webhook(url_file=str(file)), {})
    with pytest.raises(
        ConfigError, match=r"webhook\.url_env: .*variable U is not set; put the url in"
    ):
        webhook_target(Webhook(url_env="U"), {})
    with pytest.raises(ConfigError, match=r"webhook\.url_env: what is there is no URL") as error:
        webhook_target(Webhook(url_env="U"), {"U": "ftp://secret"})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["http://a..b/", f"http://{'a' * 64}.b/", "http://[::1/", "http://h:99999/", "http://h:0"],
)
def test_what_no_request_can_be_made_of_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"webhook\.url_env: what is there is no URL"):
        webhook_target(Webhook(url_env="U"), {"U": url})


async def test_nothing_that_a_url_does_ends_the_daemon() -> None:
    with structlog.testing.capture_logs() as logs:
        async with posting("http://127.0.0.1:1/") as poster:
            poster._target = Target("http://a..b/", None)
            poster.give(alert(), time_s=1.0)
            await until(lambda: logs, "it is told")
    assert "cannot post an alert to the webhook: UnicodeError" in logs[0]["detail"]
