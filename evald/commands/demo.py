"""``evald demo``: the main job on this machine, from training to the curve."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--steps", type=_positive, default=1800, metavar="N", help="default 1800")
    parser.add_argument(
        "--every", type=_positive, default=150, metavar="N", help="steps between two snapshots"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of model and training")
    parser.add_argument(
        "--min-mean",
        type=float,
        default=0.85,
        metavar="X",
        help="mean score of the last snapshot below which the exit code is 1 (default 0.85)",
    )
    parser.add_argument(
        "--keep-files", action="store_true", help="keep base model and snapshots at the end"
    )


def run(args: argparse.Namespace) -> int:
    """Show it; exit code 0 when every point ended ok and the curve climbed, 130 on Ctrl-C."""
    from evald.demo.show import Options, show

    return show(
        Options(
            steps=args.steps,
            every=args.every,
            seed=args.seed,
            min_mean=args.min_mean,
            keep_files=args.keep_files,
        )
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
