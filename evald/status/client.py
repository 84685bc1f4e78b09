"""Ask a running daemon: find its socket, fetch its status."""

from __future__ import annotations

import contextlib
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from evald.config_load import load_config
from evald.errors import EvaldError
from evald.results.locate import results_file
from evald.status.sockets import (
    LINK_NAME,
    answers,
    check_fallback,
    fallback_dir,
    runtime_dirs,
    socket_path,
)
from evald.status.view import StatusView

TIMEOUT_S = 10.0


class NotRunning(EvaldError):
    """No daemon answers where one was looked for."""


def find_socket(target: str | None) -> Path:
    """Return the socket of the daemon that ``target`` means.

    ``target``: a config file, a results directory, a ``results.jsonl``, a socket, or None for the
    only daemon of this user. Raises NotRunning when none answers, EvaldError when ``target`` is
    none of these or several daemons run, ConfigError for a bad config.
    """
    if target is None:
        return _only_daemon()
    path = _named(Path(target))
    try:
        live = answers(path)
    except OSError as error:
        raise EvaldError(f"cannot ask the daemon at {path}: {error.strerror}") from error
    if not live:
        raise NotRunning(
            f"cannot ask the daemon of {target}: none is running (no answer on {path})"
        )
    return path


def _named(path: Path) -> Path:
    if path.suffix == ".toml":
        config = load_config(path)
        link = Path(config.results.dir) / LINK_NAME
        return link.readlink() if link.is_symlink() else socket_path(config)
    if path.is_socket():
        return path
    if path.is_dir() or path.suffix == ".jsonl":
        link = results_file(str(path)).parent / LINK_NAME
        if link.is_symlink():
            return link.readlink()
        raise NotRunning(f"cannot ask the daemon of {path}: none is running")
    raise EvaldError(
        f"cannot find a daemon by {path}: it is no config (.toml), results directory, "
        "results.jsonl or socket"
    )


def _only_daemon() -> Path:
    live = [path for directory in runtime_dirs() for path in _live_sockets(directory)]
    if not live:
        raise NotRunning("cannot ask the daemon: none of this user's is running")
    if len(live) > 1:
        names = ", ".join(str(path) for path in live)
        raise EvaldError(f"cannot ask the daemon: several are running; name one of {names}")
    return live[0]


def _live_sockets(directory: Path) -> list[Path]:
    """Return the sockets in ``directory`` that answer us; others' are passed by."""
    if directory == fallback_dir() and directory.exists():
        check_fallback(directory)
    live = []
    for path in sorted(directory.glob("*.sock")):
        with contextlib.suppress(PermissionError):
            if answers(path):
                live.append(path)
    return live


async def fetch_status(socket: Path, *, timeout_s: float = TIMEOUT_S) -> StatusView:
    """Ask the daemon on ``socket`` for its status; raises NotRunning or EvaldError."""
    _, body = await _ask(socket, "GET", "/status", timeout_s=timeout_s)
    try:
        return msgspec.json.decode(body, type=StatusView)
    except msgspec.DecodeError as error:
        raise EvaldError(f"cannot understand the daemon at {socket}: {error}") from error


async def operate(socket: Path, command: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> str:
    """Send a command (the fields of ``Command``); return what was done.

    Raises NotRunning, or EvaldError with the daemon's reason for a refusal.
    """
    body = msgspec.json.encode(command)
    status, answer = await _ask(socket, "POST", "/operate", body=body, timeout_s=timeout_s)
    if status != HTTPStatus.OK:
        raise EvaldError(answer.decode())
    return answer.decode()


async def _ask(
    socket: Path, method: str, path: str, *, timeout_s: float, body: bytes | None = None
) -> tuple[int, bytes]:
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(os.fspath(socket)),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as session,
            session.request(method, f"http://evald{path}", data=body) as response,
        ):
            return response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        raise NotRunning(f"cannot ask the daemon at {socket}: none is running") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EvaldError(
            f"cannot ask the daemon at {socket}: {error or 'no answer'} within {timeout_s:g} s"
        ) from error
