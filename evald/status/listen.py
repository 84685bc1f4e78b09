"""Where the status server listens on TCP, and the token that it asks for there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.config import Status
from evald.errors import ConfigError
from evald.status.token import TokenError, check_token, read_token

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d+)"
)
_MAX_PORT = 65535
_MIN_TOKEN_CHARACTERS = 16


class TcpListener(msgspec.Struct, frozen=True):
    """An address (port 0: any free one) and its token."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        """Show everything but the token."""
        return f"TcpListener({show_address(self.host, self.port)})"


def parse_listen(text: str) -> tuple[str, int]:
    """Read ``host:port`` or ``[::1]:port``; raises ValueError with what is wrong."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no address; write host:port, such as '127.0.0.1:8008', '[::1]:8008', or "
            "'0.0.0.0:8008' for all interfaces"
        )
    port = int(match["port"])
    if port > _MAX_PORT:
        raise ValueError(f"{text!r} has no port from 0 to {_MAX_PORT}")
    return match["six"] or match["host"], port


def show_address(host: str, port: int) -> str:
    """Write an address as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_listen(status: Status) -> list[str]:
    """Return one sentence for each fault of the fields about TCP."""
    tokens = [name for name in ("token_env", "token_file") if getattr(status, name) is not None]
    if status.listen is None:
        return [
            f"status.{name}: without status.listen nobody asks for a token; set listen, or remove "
            "the line"
            for name in tokens
        ]
    problems = []
    try:
        parse_listen(status.listen)
    except ValueError as error:
        problems.append(f"status.listen: {error}")
    if len(tokens) != 1:
        got = "both" if tokens else "neither"
        problems.append(
            f"status.listen: who can reach {status.listen} can stop the daemon, so it needs a "
            f"token: set exactly one of status.token_env and status.token_file, got {got}"
        )
    return problems


def tcp_listener(status: Status, environ: Mapping[str, str]) -> TcpListener | None:
    """Return the listener that the config asks for, with its token; None: no TCP.

    Raises ConfigError for a token that is missing or too short, or that others may read.
    """
    if status.listen is None:
        return None
    host, port = parse_listen(status.listen)
    key = "token_env" if status.token_file is None else "token_file"
    try:
        if status.token_file is None:
            name = status.token_env or ""
            token = check_token(environ.get(name, ""), f"environment variable {name}")
        else:
            token = read_token(Path(status.token_file))
    except TokenError as error:
        raise ConfigError([f"status.{key}: {error}"]) from error
    if len(token) < _MIN_TOKEN_CHARACTERS:
        few = (
            f"status.{key}: the token has {len(token)} characters, and whoever guesses it can stop "
            f"the daemon; write {_MIN_TOKEN_CHARACTERS} or more, as from openssl rand -hex 32"
        )
        raise ConfigError([few])
    return TcpListener(host, port, token)
