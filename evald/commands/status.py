"""``evald status``: what the running daemon is doing, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import msgspec

from evald.commands import target

EXIT_NOT_RUNNING = 3
#: seconds between two looks, on a terminal and elsewhere; and the least.
INTERVAL_S, PLAIN_INTERVAL_S = 1.0, 10.0
_LEAST_S, _MOST_S = 0.1, 3600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help=target.HELP)
    target.add_token_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the whole status as JSON")
    how.add_argument(
        "--watch",
        action="store_true",
        help="keep it up to date until q or Ctrl-C; not on a terminal: as text, at each change",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        metavar="SECONDS",
        help=f"between two looks; default: {INTERVAL_S:g}, not on a terminal {PLAIN_INTERVAL_S:g}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the status; 3 if no daemon is running."""
    from evald.status.client import NotRunning

    try:
        return asyncio.run(_watch(args) if args.watch else _once(args))
    except NotRunning as error:
        print(f"evald: {error}", file=sys.stderr)
        return EXIT_NOT_RUNNING


async def _once(args: argparse.Namespace) -> int:
    from evald.status.client import fetch_status
    from evald.status.terminal.plain import as_text
    from evald.status.terminal.source import Source
    from evald.status.terminal.text import Painter, glyphs_of

    if args.json:
        view = await fetch_status(target.find(args))
        print(msgspec.json.format(msgspec.json.encode(view)).decode())
        return 0
    shown = await Source(lambda: target.find(args)).refresh()
    print(as_text(shown, Painter(glyphs=glyphs_of(sys.stdout))))
    return 0


async def _watch(args: argparse.Namespace) -> int:
    from evald.status.terminal.live import watch_live
    from evald.status.terminal.plain import watch_plain

    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        interval_s = args.interval or PLAIN_INTERVAL_S
        await watch_plain(lambda: target.find(args), sys.stdout, interval_s=interval_s)
    return await watch_live(
        lambda: target.find(args),
        sys.stdout,
        keys=sys.stdin.fileno() if sys.stdin.isatty() else None,
        colour=not os.environ.get("NO_COLOR"),
        interval_s=args.interval or INTERVAL_S,
    )


def _interval(text: str) -> float:
    seconds = float(text)
    if not _LEAST_S <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"must be from {_LEAST_S:g} to {_MOST_S:g}")
    return seconds
