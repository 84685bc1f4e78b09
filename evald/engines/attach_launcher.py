"""Servers that somebody else runs: evald attaches to them, and never stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from evald.engines.launcher import Boot, Launched
from evald.errors import ConfigError


class ForeignProcess:
    """Stands in for a process that is not ours: never ends, cannot be stopped."""

    pid: int | None = None
    returncode: int | None = None

    async def wait(self) -> int:
        """Wait until cancelled: whether the server is there, only its answers tell."""
        await asyncio.Event().wait()
        return 0

    async def stop(self, grace_s: float) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""


class AttachLauncher:
    """Attaches to the server at ``url`` (``http://host:port``)."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        """Tell where the server is; whether it is there shows later."""
        del attempt
        if boot is not None:
            raise ValueError("cannot start a server that somebody else runs on other weights")
        return Launched(
            process=ForeignProcess(),
            url=self._url,
            api_key=self._api_key,
            nonce=None,
            log="its own log",
        )

    def log_fault(self) -> str:
        """Know nothing of it."""
        return ""


def engine_names(urls: Sequence[str]) -> list[str]:
    """Name servers after host and port; whole URLs where that is not unique."""
    short = [url.rstrip("/").partition("://")[2] for url in urls]
    return short if len(set(short)) == len(urls) else list(urls)


def read_api_key(
    table: str, *, env: str | None, file: str | None, environ: Mapping[str, str]
) -> str | None:
    """Read the servers' API key, once; ``table`` is named in ConfigError's sentence."""
    if env is not None:
        key = environ.get(env, "").strip()
        if not key:
            problem = (
                f"{table}.api_key_env: environment variable {env} is not set; set it to the "
                "servers' API key, or remove the line"
            )
            raise ConfigError([problem])
        return key
    if file is not None:
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{table}.api_key_file: cannot read {file}: {error}"]) from error
        if not key:
            raise ConfigError([f"{table}.api_key_file: {file} is empty; write the API key into it"])
        return key
    return None
