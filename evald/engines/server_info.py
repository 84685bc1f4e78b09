"""Ask a live SGLang server how it was launched."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from evald.errors import ConfigError

TIMEOUT_S = 30.0
_OK, _UNAUTHORIZED, _FORBIDDEN = 200, 401, 403
_KEY = "fleet.inherit.url"


def fetch_launch_command(url: str, api_key: str | None, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return ``launch_command`` of ``url``'s /server_info; its other fields are resolved values.

    Blocks; inside an event loop call it in a thread. Raises ConfigError with one sentence.
    """
    try:
        status, body = asyncio.run(_get(f"{url}/server_info", api_key, timeout_s))
    except (aiohttp.ClientError, OSError) as error:
        cause = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            cause = f"no answer within {timeout_s:g} s"
        problem = (
            f"{_KEY}: cannot ask {url} for its server arguments: {cause}; start that engine first, "
            "or give its arguments as a file or command"
        )
        raise ConfigError([problem]) from error
    return launch_command_of(url, status, body)


def launch_command_of(url: str, status: int, body: bytes) -> str:
    """Return the launch command in an answer of /server_info."""
    if status in (_UNAUTHORIZED, _FORBIDDEN):
        problem = (
            f"{_KEY}: {url} wants another API key (answer {status}); "
            "set fleet.inherit.api_key_env or api_key_file"
        )
        raise ConfigError([problem])
    if status != _OK:
        problem = f"{_KEY}: {url}/server_info answers {status}; is it a SGLang server?"
        raise ConfigError([problem])
    try:
        info = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        problem = f"{_KEY}: {url}/server_info answers no JSON table; is it a SGLang server?"
        raise ConfigError([problem]) from error
    command = info.get("launch_command")
    if not isinstance(command, str) or not command.strip():
        problem = (
            f"{_KEY}: {url} does not say how it was launched (SGLang {info.get('version', '?')}, "
            "started from Python or too old); give its arguments as a file or command"
        )
        raise ConfigError([problem])
    return command


async def _get(url: str, api_key: str | None, timeout_s: float) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        return answer.status, await answer.read()
