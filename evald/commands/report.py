"""``evald report RESULTS``: curves, tables and some samples in one HTML file."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from evald.errors import ConfigError, EvaldError

if TYPE_CHECKING:
    from evald.evals.sets import LoadedSet


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "results",
        metavar="RESULTS",
        help="results directory, results.jsonl, or config (.toml: samples come with their prompts)",
    )
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE")
    parser.add_argument(
        "--samples",
        type=int,
        default=20,
        metavar="N",
        help="of each set of the last point the first N samples that are wrong or have no score "
        "(default 20; 0: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; says what is in it."""
    from evald.results.locate import results_file
    from evald.status.client import is_url
    from evald.status.report import make_report, render_report

    if is_url(args.results):
        raise EvaldError(
            f"cannot report on {args.results}: the ledger's files are needed; run it where they "
            "are, or open that URL in a browser"
        )
    if args.samples < 0:
        raise EvaldError(f"cannot take {args.samples} samples: give --samples 0 or more")
    ledger = results_file(args.results)
    sets = _sets(args.results) if args.results.endswith(".toml") and args.samples else []
    report = make_report(ledger, n_samples=args.samples, sets=sets)
    output = Path(args.output)
    size = _write(output, render_report(report).encode())
    points = sum(record.type == "point" for record in report.batch.records)
    samples = sum(len(one.samples) for one in report.samples)
    print(f"{output}: {points} points, {samples} samples, {size / 1e6:.1f} MB")
    return 0


def _sets(config: str) -> list[LoadedSet]:
    """Load the eval sets as they are now; what cannot be read has no prompts."""
    from evald.config_load import load_config
    from evald.evals.sets import load_set

    found = []
    for one in load_config(Path(config)).eval:
        try:
            found.append(load_set(one))
        except ConfigError:
            continue
    return found


def _write(output: Path, content: bytes) -> int:
    """Put the file in place whole."""
    try:
        descriptor, fresh = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(fresh).chmod(0o644)
            Path(fresh).replace(output)
        finally:
            Path(fresh).unlink(missing_ok=True)
    except OSError as error:
        raise EvaldError(
            f"cannot write {output}: {error.strerror}; name another file with -o"
        ) from error
    return len(content)
