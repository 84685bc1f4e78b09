"""``evald ctl VERB``: what an operator can do to a running daemon."""

from __future__ import annotations

import argparse
import asyncio
import sys

from evald.commands import target

EXIT_NOT_RUNNING = 3
#: a reload reads all data sets and encodes their prompts before it answers.
_RELOAD_TIMEOUT_S = 2400.0

_HELP = {
    "retry": "measure a step that has ended once more, as its next revision",
    "skip": "end a queued step as skipped (aborted)",
    "abort": "end a running step as skipped (aborted)",
    "pause": "start no further point; what runs goes on",
    "resume": "start points again",
    "drain": "let what runs finish within its deadline, then stop",
    "reload": "read the config again: eval sets, graders, alerts, log level",
    "restart": "restart an engine",
    "release": "release an engine from quarantine",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, line in _HELP.items():
        one = verbs.add_parser(verb, help=line, description=line)
        if verb in {"retry", "skip", "abort"}:
            one.add_argument("step", type=int, metavar="STEP")
            one.add_argument(
                "--run", dest="run_id", metavar="RUN", help="run id; default: the config's"
            )
        if verb in {"skip", "abort"}:
            one.add_argument("--why", default="", metavar="TEXT", help="goes into the record")
        if verb in {"restart", "release"}:
            one.add_argument(
                "engine", metavar="ENGINE", help="its name, as `evald status` shows it"
            )
        one.add_argument("--target", metavar="TARGET", help=target.HELP)
        target.add_token_argument(one)


def run(args: argparse.Namespace) -> int:
    """Send the command; 0: done, 1: refused, 3: no daemon is running."""
    from evald.status.client import TIMEOUT_S, NotRunning, operate

    fields = {"verb": "verb", "step": "step", "run_id": "run", "engine": "engine", "why": "why"}
    given = {name: getattr(args, field, None) for field, name in fields.items()}
    command = {
        # bytes of an argument that are not UTF-8 are shown as such
        name: value.encode("utf-8", "backslashreplace").decode()
        if isinstance(value, str)
        else value
        for name, value in given.items()
        if value is not None
    }
    try:
        timeout_s = _RELOAD_TIMEOUT_S if args.verb == "reload" else TIMEOUT_S
        print(asyncio.run(operate(target.find(args), command, timeout_s=timeout_s)))
    except NotRunning as error:
        print(f"evald: {error}", file=sys.stderr)
        return EXIT_NOT_RUNNING
    return 0
