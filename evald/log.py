"""Logging: an event name and key/values, for people at a terminal, for a journal, or as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from evald.text import escape

#: syslog's numbers, which `journalctl -p` filters by: systemd takes them off the line's beginning.
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
#: what key=value needs no quotes for.
_PLAIN = re.compile(r"[^\s\"'=\\{}\[\]]+")


def configure_logging(level: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send logs to standard error; called by the command, and again when the level changes."""
    if to_journal(environ.get("JOURNAL_STREAM", "")):
        last: list[structlog.typing.Processor] = [journal_lines]  # it has its own clock
    else:
        time_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        terminal = sys.stderr.isatty()
        last = [
            time_stamp,
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _printable,
            structlog.processors.format_exc_info,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Lossy(sys.stderr))),
        # so that a later configuration counts for every module
        cache_logger_on_first_use=False,
    )


class _Lossy:
    """Passes text on; what cannot be written (a full disk, a dead reader's pipe) is lost.

    Nothing that evald does is given up for a line of its log.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError):
            self._file.flush()


def to_journal(stream: str) -> bool:
    """Tell whether standard error is what ``$JOURNAL_STREAM`` names: device and inode."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def journal_lines(
    _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
) -> str:
    """Render ``<PRIORITY>event key=value ...``; a traceback follows, line by line."""
    priority = f"<{_PRIORITIES.get(str(event.pop('level', 'info')), 6)}>"
    trace = str(event.pop("exception", ""))
    words = [str(event.pop("event", "")), *(f"{key}={_value(event[key])}" for key in event)]
    lines = [" ".join(words), *trace.splitlines()]
    return "\n".join(priority + line for line in lines)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, default=str, ensure_ascii=False)


def _printable(
    _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what would command a terminal: names of files are chosen by others."""
    return {key: escape(value) if isinstance(value, str) else value for key, value in event.items()}
