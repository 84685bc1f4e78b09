"""``evald run CONFIG``: the daemon."""

from __future__ import annotations

import argparse
import functools
import gc
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    parser.add_argument(
        "--exit-on-run-end",
        action="store_true",
        help="stop once the trainer has ended the run (run.end) and every point has its record",
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning"], help="default: log_level of the config"
    )


def run(args: argparse.Namespace) -> int:
    """Check the config, then serve; exit code 0 after an orderly stop."""
    # nothing that is imported or read now is garbage; ``serve`` lets it be looked for again
    gc.disable()
    try:
        from evald.config_load import load_config

        read = functools.partial(load_config, args.config)
        config = read()

        from evald.serve import serve

        return serve(
            config, exit_on_run_end=args.exit_on_run_end, log_level=args.log_level, read=read
        )
    finally:
        gc.enable()
