"""The last line of a dead server's log: it names the cause more often than an exit code does."""

from __future__ import annotations

import os
from pathlib import Path

from evald.text import one_line

#: how much of the log's end is read, and how much of the line goes into a message.
_TAIL_BYTES = 8192
_LINE_CHARS = 300


def last_words(log_path: str, secret: str | None) -> str:
    """Return the last line of a log that says something; empty without one. Blocks.

    ``secret`` (the API key, which SGLang writes into its own log) never gets out.
    """
    try:
        with Path(log_path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if secret:
        line = line.replace(secret, "***")
    return one_line(line[:_LINE_CHARS])
