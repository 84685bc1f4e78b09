"""The ``evald`` command: parse, call, exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from evald import __version__
from evald.errors import EXIT_CONFIG, ConfigError, EvaldError

_DESCRIPTION = "The eval node of LLM training: drop a snapshot, get a point on the curve."
EXIT_INTERRUPTED = 130
#: as a shell shows a program that was ended because nobody read its output any more.
EXIT_UNREAD = 141

#: command -> (module in evald.commands, one line of help); the module is imported when it is used.
_COMMANDS = {
    "run": "run the daemon until it is told to stop",
    "check": "validate a config and print it resolved (exit 78 on a bad one)",
    "eval": "evaluate one snapshot directory, without a daemon",
    "status": "show what the daemon is doing",
    "ctl": "retry, skip or abort a step; pause, drain, reload; restart or release an engine",
    "regrade": "grade stored samples again, without a GPU, as new revisions",
    "push": "bring a finished snapshot directory to an eval node, checked there, marker last",
    "tail": "follow the ledger, one JSON record a line, or into W&B or TensorBoard (--to)",
    "report": "write curves, tables and some samples of a ledger into one HTML file",
    "wait": "wait until exactly N points have ended",
    "demo": "show the main job on this machine: training, snapshots, a curve",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    _open_closed_streams()
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # a command that has more to do on Ctrl-C sees to it itself
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # such as ``| head``
        # what is still buffered has no reader: keep the interpreter's exit from tripping over it
        unread = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(unread, stream.fileno())
        return EXIT_UNREAD


def _open_closed_streams() -> None:
    """Give standard streams that are closed (``>&-``) a place to read from, or to be lost in."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest free number, so this stream's own; programs that are started take it over
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _main(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="evald", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"evald {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if word in _COMMANDS), None)
    for name, line in _COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name == chosen:
            module = importlib.import_module(f"evald.commands.{name}")
            module.configure(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        for problem in error.problems:
            print(f"evald: {problem}", file=sys.stderr)
        return EXIT_CONFIG
    except EvaldError as error:
        print(f"evald: {error}", file=sys.stderr)
        return 1
