"""``evald regrade TARGET``: stored samples are graded again, without a GPU, as new revisions."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evald.commands import target

if TYPE_CHECKING:
    from evald.config import Config
    from evald.evals.sets import LoadedSet
    from evald.status.client import Door
    from evald.status.view import RegradeView

POLL_S = 0.5
#: the daemon reads the ledger before it answers, and may have much to do.
TIMEOUT_S = 60.0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_DESCRIPTION = (
    "Grade stored samples again by the graders (and labels) that the config has now. Each point "
    "gets a new revision; the old one stays. A running daemon does it; if none runs, and TARGET is "
    "a config, this command does."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="config (.toml); or, of a running daemon: results directory, socket, http://host:port",
    )
    target.add_token_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, nargs="+", action="extend", metavar="N")
    which.add_argument("--all", action="store_true", help="every point of the run")
    parser.add_argument("--run", dest="run_id", metavar="RUN", help="default: the config's")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="these eval sets; the others stay as they are (default: all that have a grader)",
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning"],
        help="where this command does it",
    )


def run(args: argparse.Namespace) -> int:
    """Regrade; 0: all of it is done, 1: not all of it, 78: a bad config."""
    from evald.status.client import NotRunning

    config: Config | None = None
    sets: list[LoadedSet] = []
    if Path(args.target).suffix == ".toml":
        from evald.config_load import load_config
        from evald.regrade.alone import load_sets

        config = load_config(Path(args.target))
        sets = load_sets(config, args.set)
    try:
        door = target.find(args)
    except NotRunning as error:
        if config is None:
            print(f"evald: {error}; name its config, and it needs none", file=sys.stderr)
            return EXIT_FAILED
        return _alone(args, config, sets)
    return asyncio.run(_ask(door, args, sets))


def _alone(args: argparse.Namespace, config: Config, sets: list[LoadedSet]) -> int:
    from evald.log import configure_logging
    from evald.regrade.alone import regrade_alone
    from evald.regrade.plan import What

    configure_logging(args.log_level)
    what = What(run=args.run_id or config.run, steps=args.step or [], sets=args.set)
    done = regrade_alone(config, sets, what, say=_say)
    return 0 if done else EXIT_FAILED


async def _ask(door: Door, args: argparse.Namespace, sets: list[LoadedSet]) -> int:
    """Have the daemon do it, and tell what it says until it is done."""
    from evald.status.client import fetch_status, operate

    ticket = secrets.token_hex(8)
    command = {
        "verb": "regrade",
        "run": args.run_id,
        "steps": args.step or [],
        "sets": args.set,
        "expects": {one.name: one.config_digest for one in sets},
        "ticket": ticket,
    }
    _say(await operate(door, command, timeout_s=TIMEOUT_S))
    heard = 0
    try:
        while True:
            views = (await fetch_status(door, timeout_s=TIMEOUT_S)).regrades
            view = next((one for one in views if one.ticket == ticket), None)
            if view is None:
                print("evald: the daemon was started anew meanwhile", file=sys.stderr)
                return EXIT_FAILED
            heard = _tell(view, heard)
            if view.state != "running":
                return 0 if view.state == "done" else EXIT_FAILED
            await asyncio.sleep(POLL_S)
    except asyncio.CancelledError:
        print("evald: the daemon goes on with it; see `evald status`", file=sys.stderr)
        raise


def _tell(view: RegradeView, heard: int) -> int:
    """Print what was said since; return how much was."""
    fresh = view.n_said - heard
    if fresh > len(view.said):
        _say(f"({fresh - len(view.said)} sentences are only in the daemon's log)")
    for sentence in view.said[-fresh:] if fresh else ():
        _say(sentence)
    return view.n_said


def _say(sentence: str) -> None:
    print(sentence, flush=True)
