"""``evald tail RESULTS``: the ledger as it grows, one JSON record a line."""

from __future__ import annotations

import argparse
import os
import select
import sys

import msgspec

POLL_S = 0.2
EXIT_INTERRUPTED = 130


class _Seq(msgspec.Struct):
    seq: int = 0


_decoder = msgspec.json.Decoder(_Seq)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "results", metavar="RESULTS", help="results directory, results.jsonl or config (.toml)"
    )
    parser.add_argument(
        "--after", type=int, default=0, metavar="SEQ", help="only records with a higher seq"
    )
    parser.add_argument("--once", action="store_true", help="print what is there, then stop")


def run(args: argparse.Namespace) -> int:
    """Print records until interrupted (130) or until the reader of the output goes away (0)."""
    from evald.results.follow import Follower
    from evald.results.locate import results_file

    try:
        path = results_file(args.results)
        if not path.exists():
            print(f"evald: {path} does not exist yet", file=sys.stderr)
        with Follower(path) as follower:
            _print(follower.read(), args.after)
            if args.once:
                return 0
            # asked for nothing, poll still tells that a pipe's reader has gone
            output = select.poll()
            output.register(sys.stdout.fileno(), 0)
            while not output.poll(POLL_S * 1000):
                _print(follower.read(), args.after)
            return 0
    except BrokenPipeError:
        # what is still buffered has no reader: keep the interpreter's exit from tripping over it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _print(lines: list[bytes], after: int) -> None:
    """Print the records after a seq, flushed; a line that is no record is left out."""
    for line in lines:
        try:
            seq = _decoder.decode(line).seq
        except msgspec.DecodeError:
            continue
        if seq > after:
            sys.stdout.write(line.decode() + "\n")
            sys.stdout.flush()
