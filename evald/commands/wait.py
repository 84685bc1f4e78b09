"""``evald wait --points N``: for scripts and tests: exactly N points end, none more."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evald.commands import target

if TYPE_CHECKING:
    from evald.results.follow import Follower
    from evald.results.records import PointRecord
    from evald.status.remote_ledger import RemoteLedger

POLL_S = 0.1
EXIT_UNEXPECTED = 1
EXIT_TIMEOUT = 3
EXIT_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="results directory, results.jsonl, config (.toml), or http://host:port of a daemon; "
        "default: the running daemon's",
    )
    target.add_token_argument(parser)
    parser.add_argument(
        "--points", type=_count, required=True, metavar="N", help="terminal records, exactly"
    )
    parser.add_argument("--ok", action="store_true", help="fail at once if a point is not ok")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="watch that long for one point too many; default: %(default)g",
    )


def run(args: argparse.Namespace) -> int:
    """Wait; 0: exactly N points, 1: more, or not ok, 3: fewer when the time is over."""
    deadline_s = time.monotonic() + args.timeout
    from evald.status.client import find_remote, is_url
    from evald.status.remote_ledger import RemoteLedger

    try:
        if args.target is not None and is_url(args.target):
            remote = find_remote(args.target, token_file=args.token_file)
            return _wait(RemoteLedger(remote), args, deadline_s)
        path = _results(args.target, deadline_s)
        if path is None:
            return _say(EXIT_TIMEOUT, f"no daemon is running after {args.timeout:g} s")
        from evald.results.follow import Follower

        with Follower(path) as follower:
            return _wait(follower, args, deadline_s)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _wait(follower: Follower | RemoteLedger, args: argparse.Namespace, deadline_s: float) -> int:
    ended: list[PointRecord] = []
    generation = follower.restarts
    settled_s: float | None = None
    while True:
        fresh = _points(follower.read())
        if follower.restarts != generation:  # another ledger took the place of this one
            generation, ended, settled_s = follower.restarts, [], None
        ended += fresh
        bad = [record for record in ended if record.outcome.value != "ok"]
        if args.ok and bad:
            return _say(EXIT_UNEXPECTED, f"not every point is ok: {'; '.join(map(_why, bad))}")
        if len(ended) > args.points:
            extra = ", ".join(record.record_id for record in ended[args.points :])
            return _say(
                EXIT_UNEXPECTED,
                f"{len(ended)} points have ended, expected exactly {args.points}: {extra} too many",
            )
        now_s = time.monotonic()
        if len(ended) == args.points:
            settled_s = settled_s or now_s + args.settle
            if now_s >= settled_s:
                what = "point has" if args.points == 1 else "points have"
                return _say(0, f"{args.points} {what} ended: {_outcomes(ended)}")
        elif now_s >= deadline_s:
            fault = getattr(follower, "fault", "")  # of a daemon that is asked over HTTP
            return _say(
                EXIT_TIMEOUT,
                f"{len(ended)} of {args.points} points have ended after {args.timeout:g} s "
                f"in {follower.path}" + (f": {fault}" if fault else ""),
            )
        time.sleep(POLL_S)


def _results(target: str | None, deadline_s: float) -> Path | None:
    """Return the ledger of ``target``, or of the daemon that runs or starts in time."""
    from evald.results.locate import results_file

    if target is not None:
        return results_file(target)
    from evald.status.client import NotRunning, fetch_status, find_socket

    while True:
        try:
            return results_file(asyncio.run(fetch_status(find_socket(None))).results)
        except NotRunning:
            if time.monotonic() >= deadline_s:
                return None
        time.sleep(POLL_S)


def _points(lines: list[bytes]) -> list[PointRecord]:
    """Return the terminal records among ``lines``; what is no record is passed by."""
    from evald.results.records import PointRecord, decode_any

    points = []
    for line in lines:
        try:
            record = decode_any(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, PointRecord):
            points.append(record)
    return points


def _why(record: PointRecord) -> str:
    reason = f" {record.reason}" if record.reason else ""
    detail = f" ({record.detail})" if record.detail else ""
    return f"{record.record_id} is {record.outcome.value}{reason}{detail}"


def _outcomes(ended: list[PointRecord]) -> str:
    outcomes = [record.outcome.value for record in ended]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)) or "none"


def _say(code: int, sentence: str) -> int:
    stream = sys.stderr if code else sys.stdout
    print(f"evald: {sentence}" if code else sentence, file=stream)
    return code


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number
