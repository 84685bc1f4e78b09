"""``evald push DIR DEST``: a finished directory goes to an eval node, by rsync or a plain copy."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evald.trainer.push.manifest import SourceFile

#: names of files that are shown.
_SHOWN = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a finished snapshot")
    parser.add_argument(
        "destination",
        metavar="DEST",
        help="the eval node's staging root: host:/path, user@host:/path (rsync over ssh), or the "
        "path of a file system that both hosts see",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="its name below the root, as the node's pattern says, such as step_40 or run/step_40; "
        "default: DIR's own",
    )
    parser.add_argument(
        "--pattern",
        type=_pattern,
        metavar="PATTERN",
        help="the node's staging.pattern, which NAME has to fit; default: what its daemon shows",
    )
    parser.add_argument(
        "--marker", default=".complete", metavar="FILE", help="written last; default: %(default)s"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every file; default: weights, config, tokenizer, templates, code and adapter/, not "
        "what a trainer keeps to resume from",
    )
    parser.add_argument(
        "--streams", type=int, default=4, metavar="N", help="copies at once; default: %(default)s"
    )
    parser.add_argument(
        "--timeout",
        type=_above_zero,
        default=1800.0,
        metavar="SECONDS",
        help="default: %(default)g",
    )
    parser.add_argument(
        "--max-mb-s",
        type=_above_zero,
        metavar="MB",
        help="most megabytes a second over the network; default: no limit",
    )
    parser.add_argument(
        "--ssh",
        type=_words,
        default="ssh",
        metavar="COMMAND",
        help="ssh with further options, such as 'ssh -p 2222 -i key'; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Push and say what was done; 1: it did not arrive, and pushing again goes on from there."""
    from evald.log import configure_logging
    from evald.trainer.push import carrier_for
    from evald.trainer.push.plan import check_name, pack

    configure_logging("warning")  # this output is for a person
    directory: Path = args.directory.resolve()
    try:
        name = check_name(args.name or directory.name)
        carrier = carrier_for(
            args.destination,
            root=directory.parent,
            marker=args.marker,
            streams=args.streams,
            timeout_s=args.timeout,
            ssh=args.ssh,
            max_bytes_s=None if args.max_mb_s is None else max(int(args.max_mb_s * 1e6), 1),
        )
    except ValueError as error:
        return _fail(str(error))
    if not re.search("[0-9]", name):
        return _fail(f"cannot push as {name}: no step number is in it; give --name step_40")
    fault = _misfit(name, args.pattern or carrier.pattern())
    if fault:
        return _fail(fault)
    started = time.monotonic()
    # what was never marked gets a manifest, so that evald checks the hashes, too
    parcel = pack(directory, name, marker=args.marker, unmarked=True, everything=args.all)
    pushed = carrier.deliver(parcel)
    seconds = time.monotonic() - started
    what = f"{name} to {args.destination}: {len(parcel.files)} files, {parcel.size_bytes} bytes"
    if pushed:
        rate = parcel.size_bytes / 1e6 / max(seconds, 1e-3)
        print(f"pushed {what}, checked, in {seconds:.1f} s ({rate:.0f} MB/s)")
    else:
        print(f"nothing to push of {what} are there already, and equal")
    if parcel.left_out:
        print(_left_out(parcel.left_out))
    return 0


def _misfit(name: str, pattern: str | None) -> str:
    """Say why no node would take a snapshot of this name; empty: nothing is known against it."""
    from evald.presets import PRESETS
    from evald.trainer.push.choice import fits

    if pattern is not None and not fits(name, pattern):
        return (
            f"cannot push as {name}: the node's pattern {pattern} does not fit it; give --name "
            f"{pattern.replace('{step}', '40')}"
        )
    usual = {preset.pattern for preset in PRESETS.values()}
    if pattern is None and not any(fits(name, one) for one in usual):
        print(
            f"evald: no usual pattern fits {name} ({', '.join(sorted(usual))}): the node takes it "
            "only if its staging.pattern does; --pattern checks that",
            file=sys.stderr,
        )
    return ""


def _left_out(files: Sequence[SourceFile]) -> str:
    names = ", ".join(file.name for file in files[:_SHOWN])
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    size_bytes = sum(file.size_bytes for file in files)
    return (
        f"left out {names}{more} ({size_bytes} bytes), which no evaluation needs; --all sends "
        "everything"
    )


def _above_zero(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is no number above 0")


def _pattern(text: str) -> str:
    if "{step}" not in text:
        raise argparse.ArgumentTypeError(f"{text} lacks {{step}}")
    return text


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from error
    if not words:
        raise argparse.ArgumentTypeError("it is empty; write ssh, or ssh with options")
    return words


def _fail(sentence: str) -> int:
    print(f"evald: {sentence}", file=sys.stderr)
    return 1
