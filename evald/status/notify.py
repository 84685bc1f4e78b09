"""Tell systemd how the daemon does (``sd_notify``), where systemd asked for it."""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger(__name__)


def notify(message: str) -> bool:
    """Send ``message`` (``READY=1``, ``STATUS=...``, ``STOPPING=1``, ``WATCHDOG=1``; one a line).

    Does nothing without ``$NOTIFY_SOCKET``. Never blocks and never fails the daemon: returns
    whether the message was handed over.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract name space
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            manager.sendto(message.encode(), address)
    except OSError as error:
        log.warning("notify_failed", socket=os.environ["NOTIFY_SOCKET"], error=str(error))
        return False
    return True
