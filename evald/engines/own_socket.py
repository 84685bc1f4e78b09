"""The connection between the daemon and a process of user's code, and what its end means."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from evald.engines.process import EngineProcess
from evald.engines.process_log import last_words

#: process id, user id and group id of who is at the other end of a socket.
_CREDENTIALS = struct.Struct("3i")


def listen(name: str) -> socket.socket:
    """Listen on an abstract unix socket: no file that could be left behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(f"\0{name}")
    listener.listen(1)
    return listener


async def accept(listener: socket.socket) -> socket.socket:
    """Accept the child; a stranger, of another user, is sent away."""
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(answer)[1] == os.geteuid():
            return connection
        connection.close()


async def how_it_ended(process: EngineProcess) -> str:
    """Say in words how a process ended: its code, and the last words of its log."""
    words = await asyncio.to_thread(last_words, process.log_path)
    code = process.returncode
    if code is None:
        ending = "it closed evald's socket"
    elif code < 0:
        ending = f"it was killed by signal {-code}"
    else:
        ending = f"it ended with exit code {code}"
    return f"{ending}; last in {process.log_path}: {words or 'nothing'}"
