"""The log files of a process: where the next one lies, and what a dead process said last."""

from __future__ import annotations

import os
import re
from pathlib import Path

from evald.text import hide_secrets, one_line

#: how much of a log's end is read, how many of its lines are shown, and how much of those.
_TAIL_BYTES = 8192
_LINES = 3
_MAX_CHARS = 300
#: less than that is no room: a start of SGLang logs about as much.
_ROOM_BYTES = 64 << 10
#: colours, and whatever else a program tells a terminal.
TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def next_log(directory: Path, *, keep: int) -> Path:
    """Choose a log file: numbers go on over restarts of the daemon, the newest ``keep`` stay.

    Blocks; raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    logs = sorted(
        (path for path in directory.glob("*.log") if path.stem.isdigit()),
        key=lambda path: int(path.stem),
    )
    for path in logs[: max(len(logs) + 1 - keep, 0)]:
        path.unlink(missing_ok=True)
    number = int(logs[-1].stem) + 1 if logs else 1
    return directory / f"{number:04d}.log"


def log_fault(directory: Path) -> str:
    """Say in one sentence why nothing can be written into a directory; empty: it can. Blocks."""
    probe = directory / ".room"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(_ROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return (
            f"cannot write into {directory}: {error.strerror or error}; make room, or correct the "
            "rights: the engine is then started"
        )
    return ""


def last_words(log_path: str | Path, *, secret: str | None = None) -> str:
    """Return what ``closing_words`` makes of a log's end; empty without one. Blocks."""
    try:
        with Path(log_path).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            tail = file.read().decode(errors="replace")
    except OSError:
        return ""
    return closing_words(tail, secret=secret)


def closing_words(tail: str, *, secret: str | None = None) -> str:
    """Return the last lines of a log's end that say anything, as one; empty without any.

    They name the cause of a death more often than an exit code does. No secret gets out: neither
    what looks like one, nor ``secret`` (the API key, which SGLang writes into its own log).
    """
    # progress bars end their lines with a carriage return
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]", TERMINAL.sub("", tail))]
    # lines of nothing but ^ and ~ point at code that is not shown here
    said = [line for line in lines if line.strip(" ^~")]
    shown = hide_secrets(" | ".join(said[-_LINES:]))
    if secret:
        shown = shown.replace(secret, "(hidden)")
    return one_line(shown if len(shown) <= _MAX_CHARS else "..." + shown[-_MAX_CHARS:])
