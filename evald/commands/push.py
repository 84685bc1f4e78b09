"""``evald push DIR DEST``: a finished directory goes to an eval node, by rsync or a plain copy."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from pathlib import Path


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
        "--marker", default=".complete", metavar="FILE", help="written last; default: %(default)s"
    )
    parser.add_argument(
        "--streams", type=int, default=4, metavar="N", help="copies at once; default: %(default)s"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="default: %(default)g"
    )
    parser.add_argument(
        "--max-mb-s",
        type=float,
        metavar="MB",
        help="most megabytes a second over the network; default: no limit",
    )
    parser.add_argument(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help="ssh with further options, such as 'ssh -p 2222 -i key'; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Push and say what was done; 1: it did not arrive, and pushing again goes on from there."""
    from evald.log import configure_logging
    from evald.trainer.push import carrier_for
    from evald.trainer.push.plan import check_name, make_manifest, pack

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
            ssh=shlex.split(args.ssh),
            max_bytes_s=None if args.max_mb_s is None else int(args.max_mb_s * 1e6),
        )
    except ValueError as error:
        return _fail(str(error))
    if not re.search("[0-9]", name):
        return _fail(f"cannot push as {name}: no step number is in it; give --name step_40")
    started = time.monotonic()
    content = None
    if not (directory / args.marker).exists():
        # what was never marked gets a manifest, so that evald checks the hashes, too
        content = make_manifest(directory, marker=args.marker)
    parcel = pack(directory, name, marker=args.marker, content=content)
    pushed = carrier.deliver(parcel)
    seconds = time.monotonic() - started
    what = f"{name} to {args.destination}: {len(parcel.files)} files, {parcel.size_bytes} bytes"
    if pushed:
        rate = parcel.size_bytes / 1e6 / max(seconds, 1e-3)
        print(f"pushed {what}, checked, in {seconds:.1f} s ({rate:.0f} MB/s)")
    else:
        print(f"nothing to push of {what} are there already, and equal")
    return 0


def _fail(sentence: str) -> int:
    print(f"evald: {sentence}", file=sys.stderr)
    return 1
