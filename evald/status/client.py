"""Ask a running daemon: find it, fetch its status, tell it something."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

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
from evald.status.token import TOKEN_VARIABLE, check_token, read_token
from evald.status.view import LAST_SEQ_HEADER, StatusView
from evald.text import one_line

TIMEOUT_S = 10.0
#: samples of a set may be gigabytes.
SAMPLES_TIMEOUT_S = 600.0


class NotRunning(EvaldError):
    """No daemon answers where one was looked for."""


class NoAnswer(EvaldError):
    """The daemon is there, and did not answer in time, or not to the end."""


class Remote(msgspec.Struct, frozen=True):
    """A daemon that is asked over TCP."""

    url: str
    token: str | None = None

    def __str__(self) -> str:
        """Show the URL; the token is nobody's business."""
        return self.url

    __repr__ = __str__


#: a unix socket, or a URL with its token.
Door = Path | Remote


def is_url(target: str) -> bool:
    """Tell whether a command line names a daemon by its URL."""
    return target.startswith(("http://", "https://"))


def find_daemon(
    target: str | None, *, token_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> Door:
    """Return where to ask the daemon that ``target`` means: a URL, or what find_socket() takes.

    Raises as find_remote() and find_socket() do.
    """
    if target is not None and is_url(target):
        return find_remote(target, token_file=token_file, environ=environ)
    return find_socket(target)


def find_remote(
    url: str, *, token_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> Remote:
    """Return the daemon behind a URL, with the token in ``token_file`` or in ``$EVALD_TOKEN``.

    Raises EvaldError for a URL or a token that cannot be used.
    """
    try:
        good = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        good = False
    if not good:
        raise EvaldError(f"cannot ask the daemon at {url}: that is no URL; write http://host:port")
    token = None
    if token_file is not None:
        token = read_token(Path(token_file))
    elif TOKEN_VARIABLE in environ:
        token = check_token(environ[TOKEN_VARIABLE], f"environment variable {TOKEN_VARIABLE}")
    return Remote(url.rstrip("/"), token)


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
        "results.jsonl, socket or http://host:port"
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


async def fetch_status(door: Door, *, timeout_s: float = TIMEOUT_S) -> StatusView:
    """Ask a daemon for its status; raises NotRunning or EvaldError."""
    _, body = await ask(door, "GET", "/status", timeout_s=timeout_s)
    try:
        return msgspec.json.decode(body, type=StatusView)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EvaldError(f"cannot understand the daemon at {door}: {error}") from error


async def fetch_records(
    door: Door, after: int, *, wait_s: float = 0.0, timeout_s: float = TIMEOUT_S
) -> tuple[list[bytes], int]:
    """Return the next lines of the ledger with a ``seq`` above ``after``, and the newest ``seq``.

    While there is none, the daemon answers after ``wait_s``. Raises as fetch_status() does.
    """
    query = urlencode({"after": after, "wait_s": wait_s})
    headers, body = await ask(door, "GET", f"/records?{query}", timeout_s=timeout_s + wait_s)
    newest = headers.get(LAST_SEQ_HEADER, "")
    if not newest.isdecimal():
        raise EvaldError(f"cannot understand the daemon at {door}: it does not say the newest seq")
    return body.splitlines(), int(newest)


async def fetch_samples(
    door: Door, record_id: str, set_name: str, *, timeout_s: float = SAMPLES_TIMEOUT_S
) -> bytes:
    """Return the stored samples of one eval set of a point. Raises as fetch_status() does."""
    query = urlencode({"record_id": record_id, "set": set_name})
    _, body = await ask(door, "GET", f"/samples?{query}", timeout_s=timeout_s)
    return body


async def operate(door: Door, command: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> str:
    """Send a command (the fields of ``Command``); return what was done.

    Raises NotRunning, or EvaldError with the daemon's reason for a refusal.
    """
    body = msgspec.json.encode(command)
    _, answer = await ask(door, "POST", "/operate", body=body, timeout_s=timeout_s)
    return answer.decode()


async def ask(
    door: Door, method: str, path: str, *, timeout_s: float, body: bytes | None = None
) -> tuple[Mapping[str, str], bytes]:
    """Send one request; return headers and body of the answer.

    Raises NotRunning, NoAnswer, or EvaldError with the daemon's own sentence.
    """
    headers = {}
    if isinstance(door, Remote):
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector()
        base = door.url
        if door.token is not None:
            headers["Authorization"] = f"Bearer {door.token}"
    else:
        connector, base = aiohttp.UnixConnector(os.fspath(door)), "http://evald"
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as session,
            session.request(
                method, f"{base}{path}", data=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            answer = await response.read()
    except aiohttp.ClientConnectorError as error:
        raise NotRunning(f"cannot ask the daemon at {door}: none is running there") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoAnswer(
            f"cannot ask the daemon at {door}: {str(error) or 'no answer'} within {timeout_s:g} s"
        ) from error
    if response.status == HTTPStatus.UNAUTHORIZED:
        raise EvaldError(
            f"cannot ask the daemon at {door}: it refuses the token; give the right one with "
            f"--token-file or ${TOKEN_VARIABLE}"
        )
    if response.status != HTTPStatus.OK:
        said = one_line(answer.decode(errors="replace").strip()) or f"HTTP {response.status}"
        raise EvaldError(said)
    return response.headers, answer
