"""Fresh TCP ports for engines."""

from __future__ import annotations

import collections
import random
import socket
from collections.abc import Callable
from pathlib import Path

from evald.errors import EvaldError

#: below it live services that have a name.
LOWEST = 10_000
HIGHEST = 65_535
#: ports handed out lately, by anybody in this process: an engine binds its own only after seconds.
RECENT = 1024
ATTEMPTS = 1000

_recent: collections.deque[int] = collections.deque(maxlen=RECENT)


def port_range(ip_local_port_range: str) -> range:
    """Return the ports to choose from, outside of the ephemeral range (the kernel's two numbers).

    Any process may be given an ephemeral port at any moment, also between our look and the engine's
    bind. Where the kernel leaves too few below that range, the ports above it serve, else all.
    """
    first, last = map(int, ip_local_port_range.split())
    below, above = range(LOWEST, first), range(last + 1, HIGHEST + 1)
    wide_enough = [ports for ports in (below, above) if len(ports) >= 2 * RECENT]
    return wide_enough[0] if wide_enough else range(LOWEST, HIGHEST + 1)


def is_free(port: int) -> bool:
    """Whether nobody holds ``port``, neither on the loopback interface nor on all interfaces."""
    for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104 (bound for a moment, never listening)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # Without SO_REUSEADDR: a port with connections in TIME_WAIT counts as taken.
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def free_port(
    *,
    rng: random.Random | None = None,
    ports: range | None = None,
    is_free: Callable[[int], bool] = is_free,
) -> int:
    """Return a port that is free and was not among the last RECENT that this process handed out.

    Raises EvaldError when ATTEMPTS ports in a row are taken.
    """
    rng = rng or random.SystemRandom()
    if ports is None:
        ports = port_range(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())
    for _ in range(ATTEMPTS):
        port = rng.choice(ports)
        if port not in _recent and is_free(port):
            _recent.append(port)
            return port
    raise EvaldError(
        f"cannot find a free port: {ATTEMPTS} ports between {ports.start} and {ports.stop - 1} are "
        "taken; end what holds them (ss -ltnp)"
    )
