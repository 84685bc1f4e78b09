"""Logging set-up: an event name and key/values, readable on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog

from evald.text import escape


def configure_logging(level: str) -> None:
    """Send logs to standard error; called once, by the command."""
    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _printable,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        # so that a later configuration counts for every module
        cache_logger_on_first_use=False,
    )


def _printable(
    _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what would command a terminal: names of files are chosen by others."""
    return {key: escape(value) if isinstance(value, str) else value for key, value in event.items()}
