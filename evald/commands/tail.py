"""``evald tail RESULTS``: the ledger as it grows, printed, or delivered elsewhere (``--to``)."""

from __future__ import annotations

import argparse
import os
import select
import sys

from evald.commands import tail_to, target

POLL_S = 0.2
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "results",
        metavar="RESULTS",
        help="results directory, results.jsonl, config (.toml), or http://host:port of a daemon",
    )
    parser.add_argument(
        "--after", type=int, default=0, metavar="SEQ", help="only records with a higher seq"
    )
    parser.add_argument("--once", action="store_true", help="print what is there, then stop")
    target.add_token_argument(parser)
    tail_to.configure(parser)
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print records until interrupted (130) or until the reader of the output goes away (0).

    With --once, 3 if the daemon behind a URL does not answer.
    """
    from evald.status.client import is_url

    tail_to.check(args.refuse, args)
    if args.to is not None:
        return tail_to.run(args)
    try:
        return _tail_remote(args) if is_url(args.results) else _tail(args)
    except BrokenPipeError:
        # what is still buffered has no reader: keep the interpreter's exit from tripping over it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _tail(args: argparse.Namespace) -> int:
    from evald.results.follow import Follower
    from evald.results.locate import results_file

    path = results_file(args.results)
    if not path.exists():
        print(f"evald: {path} does not exist yet", file=sys.stderr)
    with Follower(path, after=args.after) as follower:
        while True:
            for lines in follower.batches():
                _print(lines, args.after)
            if args.once or _reader_has_gone():
                return 0


def _tail_remote(args: argparse.Namespace) -> int:
    """Follow over HTTP; a daemon that does not answer is waited for, and named once."""
    from evald.status.client import find_remote
    from evald.status.remote_ledger import RemoteLedger

    remote = find_remote(args.results, token_file=args.token_file)
    ledger = RemoteLedger(remote, after=args.after)
    _print(ledger.read(wait_s=0), args.after)
    said = ""
    while True:
        if ledger.fault and not said:
            print(f"evald: {ledger.fault}", file=sys.stderr)
        said = ledger.fault
        if args.once:
            return EXIT_NOT_RUNNING if said else 0
        if _reader_has_gone():
            return 0
        _print(ledger.read(), args.after)


def _reader_has_gone() -> bool:
    """Wait a moment; tell whether a pipe's reader has gone: asked for nothing, poll tells that."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(POLL_S * 1000))


def _print(lines: list[bytes], after: int) -> None:
    """Print the records after a seq, flushed; a line that is no record is left out."""
    from evald.status.pages import seq_of

    for line in lines:
        seq = seq_of(line)
        if seq is not None and seq > after:
            sys.stdout.write(line.decode() + "\n")
            sys.stdout.flush()
