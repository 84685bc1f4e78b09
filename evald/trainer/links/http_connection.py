"""One connection of a training process to the daemon, whose every step ends by a deadline.

Standard library only: a training job has its own ideas about HTTP packages.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PORTS = {"http": 80, "https": 443}


class Place(msgspec.Struct, frozen=True):
    """Where a URL leads: ``host`` is the socket's path for ``unix``."""

    scheme: str
    host: str
    port: int = 0
    #: in front of every path, without a slash at its end; a proxy may want one.
    prefix: str = ""


def parse_url(url: str) -> Place:
    """Read ``http://host:port``, ``https://host`` or ``unix:/path``; raises ValueError."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        if path.startswith("///"):  # as a URL is written
            path = path.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"cannot use url {url!r}: give an absolute path, unix:/path/to/socket")
        return Place("unix", path)
    parts = urlsplit(url)
    try:
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        port = 0
    known = parts.scheme in _PORTS and parts.hostname
    if not known or not port or parts.query or parts.fragment or parts.username:
        raise ValueError(
            f"cannot use url {url!r}: write http://host:port, https://host or unix:/path/to/socket"
        )
    return Place(parts.scheme, parts.hostname or "", port, parts.path.rstrip("/"))


class Connection(http.client.HTTPConnection):
    """A connection whose every step ends by a deadline."""

    def __init__(self, place: Place, deadline: float) -> None:
        super().__init__("localhost" if place.scheme == "unix" else place.host, place.port or None)
        self._place = place
        self._deadline = deadline
        self.response_class = cast(
            "type[http.client.HTTPResponse]", functools.partial(_Response, self)
        )

    @property
    def deadline(self) -> float:
        """When the exchange under way must have ended, on the monotonic clock."""
        return self._deadline

    def connect(self) -> None:
        """Open the socket; raises OSError."""
        place = self._place
        if place.scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.allow_until(self._deadline)
            self.sock.connect(place.host)
            return
        plain = self._connect_any(_resolve(place, self._deadline))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if place.scheme == "https":
            context = ssl.create_default_context()
            self.allow_until(self._deadline)  # the handshake gets what connecting has left
            plain = context.wrap_socket(plain, server_hostname=place.host)
        self.sock = plain

    def _connect_any(self, addresses: list[Any]) -> socket.socket:
        fault: OSError = OSError("its name has no address")
        for family, kind, protocol, _, address in addresses:
            self.sock = socket.socket(family, kind, protocol)
            try:
                self.allow_until(self._deadline)
                self.sock.connect(address)
            except OSError as error:
                self.sock.close()
                fault = error
            else:
                return self.sock
        raise fault

    def allow_until(self, deadline: float) -> None:
        """Set the socket's timeout to what is left; raises TimeoutError when nothing is."""
        self._deadline = deadline
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        if self.sock is not None:  # the last answer of a connection is read without it
            self.sock.settimeout(left_s)


class _Response(http.client.HTTPResponse):
    """A response of which every single read, of headers too, ends by the connection's deadline."""

    def __init__(
        self,
        connection: Connection,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_TimedReads(sock, raw, connection.deadline))


class _TimedReads(io.RawIOBase):
    """Reads of a socket: a peer that drips a byte a second gets no new timeout for each."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        super().__init__()
        self._sock = sock
        self._raw = raw
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left_s)
        return cast("int | None", self._raw.readinto(buffer))

    def close(self) -> None:
        self._raw.close()
        super().close()


def _resolve(place: Place, deadline: float) -> list[Any]:
    """Look a name up; a resolver that hangs is left behind in its thread. Raises OSError."""
    found: SimpleQueue[list[Any] | OSError] = SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(error)

    threading.Thread(target=look_up, name="evald resolver", daemon=True).start()
    try:
        answer = found.get(timeout=max(deadline - time.monotonic(), 0.001))
    except Empty:
        raise TimeoutError(f"the name {place.host} was not resolved in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer
