"""Alerts to somewhere else: posted as JSON, tried again within bounds, never waited for."""

from __future__ import annotations

import asyncio
import html
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from evald.config_alerts import Webhook
from evald.errors import ConfigError
from evald.results.records import Alert
from evald.status.token import TokenError, check_token, read_token

log = structlog.get_logger(__name__)

#: one try.
_TRY_S = 10.0
#: between two tries: doubles from the first to the last.
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 8.0
#: alerts that wait; with more, the oldest are given up.
_MOST_WAITING = 200
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = range(500, 600)


class Target(msgspec.Struct, frozen=True):
    """Where to post, with the secrets; never shown."""

    url: str
    token: str | None

    def __repr__(self) -> str:
        """Show nothing."""
        return "Target(...)"


def webhook_target(config: Webhook, environ: Mapping[str, str]) -> Target:
    """Find URL and token; raises ConfigError for one that is missing or cannot be used."""
    url = _secret("url", config.url_env, config.url_file, environ)
    token = None
    if config.token_env is not None or config.token_file is not None:
        token = _secret("token", config.token_env, config.token_file, environ)
    if not _is_url(url):
        key = "url_env" if config.url_file is None else "url_file"
        raise ConfigError([f"webhook.{key}: what is there is no URL; put http(s)://host/... in"])
    return Target(url, token)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
    except ValueError:  # no port, no address, or a label that is empty or too long
        return False


def _secret(what: str, env: str | None, file: str | None, environ: Mapping[str, str]) -> str:
    key = f"{what}_env" if file is None else f"{what}_file"
    if file is None and not environ.get(env or ""):
        raise ConfigError(
            [f"webhook.{key}: environment variable {env} is not set; put the {what} in"]
        )
    try:
        if file is not None:
            return read_token(Path(file), what)
        return check_token(environ[env or ""], f"environment variable {env}", what)
    except TokenError as error:
        raise ConfigError([f"webhook.{key}: {error}"]) from error


class Poster:
    """Posts what it is given, in order; a receiver that fails is told of once, in the log."""

    def __init__(self, config: Webhook, target: Target) -> None:
        self._config = config
        self._target = target
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._more = asyncio.Event()
        self._failing = False

    def give(self, alert: Alert, *, time_s: float) -> None:
        """Post ``alert`` soon; ``time_s``: since the epoch."""
        self._waiting.append(msgspec.json.encode(_message(alert, time_s)))
        self._more.set()

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            await self.flush()

    async def flush(self) -> None:
        """Post what waits now."""
        async with aiohttp.ClientSession() as session:
            while self._waiting:
                body = self._waiting[0]
                fault = await self._deliver(session, body)
                if self._waiting and self._waiting[0] is body:  # else it was given up meanwhile
                    self._waiting.popleft()
                self._tell(fault)

    async def _deliver(self, session: aiohttp.ClientSession, body: bytes) -> str:
        """Try until it is taken, or it is no use; returns what went wrong, empty if nothing."""
        fault = ""
        try:
            async with asyncio.timeout(self._config.deadline_s):
                for number in range(self._config.attempts):
                    if number:
                        await asyncio.sleep(min(_FIRST_RETRY_S * 2.0 ** (number - 1), _MAX_RETRY_S))
                    fault, again = await self._try(session, body)
                    if not again:
                        break
        except TimeoutError:
            late = f"not taken within {self._config.deadline_s:g} s"
            fault = f"{late}; last: {fault}" if fault else late
        return fault

    async def _try(self, session: aiohttp.ClientSession, body: bytes) -> tuple[str, bool]:
        """Post once; what went wrong, and whether another try may go better."""
        headers = {"Content-Type": "application/json"}
        if self._target.token is not None:
            headers["Authorization"] = f"Bearer {self._target.token}"
        try:
            async with (
                asyncio.timeout(_TRY_S),
                session.post(
                    self._target.url,
                    data=body,
                    headers=headers,
                    # a redirect would carry the token elsewhere
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, connect=_TRY_S, sock_read=_TRY_S),
                ) as response,
            ):
                status = response.status
        except TimeoutError:
            return f"no answer within {_TRY_S:g} s", True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return type(error).__name__, True  # (its words may hold the URL)
        if status < 300:  # noqa: PLR2004 - taken
            return "", False
        again = status == _TOO_MANY_REQUESTS or status in _SERVER_ERRORS
        return f"it answered with status {status}", again

    def _tell(self, fault: str) -> None:
        if fault and not self._failing:
            log.warning(
                "webhook_failed",
                detail=f"cannot post an alert to the webhook: {fault}; see to the URL and its "
                "receiver: the ledger has all alerts",
            )
        if not fault and self._failing:
            log.info("webhook_works_again")
        self._failing = bool(fault)


def _message(alert: Alert, time_s: float) -> dict[str, Any]:
    state = "over" if alert.cleared else "alert"
    # Slack takes <...> for links and mentions; names of files are chosen by others
    text = html.escape(f"evald {alert.run}: {state} {alert.name}: {alert.detail}", quote=False)
    return {
        "text": text,
        "name": alert.name,
        "detail": alert.detail,
        "subject": alert.subject,
        "cleared": alert.cleared,
        "run": alert.run,
        "step": alert.step,
        "revision": alert.revision,
        "record_id": alert.record_id,
        "time": alert.time or time_s,
    }
