"""How a command line names the daemon that it means."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evald.status.client import Door

HELP = (
    "config (.toml), results directory, socket, or http://host:port; default: this user's only "
    "daemon"
)


def add_token_argument(parser: argparse.ArgumentParser) -> None:
    """Add what a daemon behind a URL asks for."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="token of a daemon that is named by http://host:port; default: $EVALD_TOKEN",
    )


def find(args: argparse.Namespace) -> Door:
    """Return where to ask ``args.target``; raises NotRunning or EvaldError."""
    from evald.status.client import find_daemon

    return find_daemon(args.target, token_file=args.token_file)
