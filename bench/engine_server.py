"""The server behind a daemon's engine, asked directly: for what evald is compared with."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple


class Server(NamedTuple):
    """A running server, and the key that it wants."""

    url: str
    api_key: str

    @property
    def headers(self) -> dict[str, str]:
        """What each request to it carries."""
        return {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}

    def ask(self, path: str, body: object = None, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """POST ``body`` as JSON, or GET; the JSON answer, {} for an empty one. Raises OSError."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, self.headers)  # noqa: S310 - http
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - as above
            answer: dict[str, Any] = json.loads(response.read() or b"{}")
        return answer


def command_line(pid: int) -> list[str]:
    """Read with which words a process was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]


def server_of(pid: int) -> Server:
    """Find the server that evald started as process ``pid``; its key is in a file of its own."""
    words = command_line(pid)
    config = json.loads(Path(words[words.index("--config") + 1]).read_bytes())
    return Server(f"http://127.0.0.1:{words[words.index('--port') + 1]}", config["api-key"])
