"""Where the status socket lies, and whether a daemon answers there."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path

from evald.config import Config
from evald.errors import ConfigError, EvaldError

#: a symbolic link in the results directory to the socket of the daemon that writes there.
LINK_NAME = "status.sock"
#: of sun_path, without the closing NUL.
MAX_PATH_BYTES = 107
CONNECT_TIMEOUT_S = 2.0


def socket_path(config: Config) -> Path:
    """Return the daemon's socket: configured, or named after run and results directory.

    Raises ConfigError for a path that is too long for a unix socket.
    """
    if config.status.socket is not None:
        path = Path(config.status.socket)
    else:
        results = str(Path(config.results.dir).resolve())
        hash8 = hashlib.sha256(results.encode()).hexdigest()[:8]
        path = runtime_dirs()[0] / f"{config.run}-{hash8}.sock"
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        problem = (
            f"cannot use status.socket {path}: it has {length} bytes, a unix socket's path has "
            f"at most {MAX_PATH_BYTES}; set status.socket to a shorter path"
        )
        raise ConfigError([problem])
    return path


def runtime_dirs() -> list[Path]:
    """Return the directories that may hold sockets of daemons, ours first.

    Under systemd ``$RUNTIME_DIRECTORY`` is the service's own; whoever asks from outside the
    service does not have that variable, and finds the usual place at the end of the list.
    """
    user = os.geteuid()
    own = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [
        Path(own) if own else None,
        Path(session) / "evald" if session else None,
        fallback_dir(),
        Path(f"/run/user/{user}/evald"),
        Path("/run/evald"),
    ]
    return list(dict.fromkeys(path for path in candidates if path is not None))


def fallback_dir() -> Path:
    """Return the directory for sockets where neither systemd nor the session gives one."""
    return Path(f"/tmp/evald-{os.geteuid()}")  # noqa: S108 - check_fallback() before use


def check_fallback(directory: Path) -> None:
    """Make sure that nobody else made or may change ``directory``, a path in /tmp that exists.

    Raises EvaldError.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        fault = "it is not a directory"
    elif status.st_uid != os.geteuid():
        fault = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        fault = f"others may enter it (mode {stat.S_IMODE(status.st_mode):04o}, not 0700)"
    else:
        return
    raise EvaldError(
        f"cannot trust {directory}: {fault}; remove it, or set status.socket to another place"
    )


def answers(path: Path) -> bool:
    """Tell whether a process listens on ``path``; raises OSError if it may not be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):  # its backlog is full: busy, but there
            return True
    return True
