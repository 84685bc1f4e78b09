"""``evald report RESULTS``: curves, tables and some samples in one HTML file."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from evald.commands.target import add_token_argument
from evald.errors import ConfigError, EvaldError

if TYPE_CHECKING:
    from evald.evals.sets import LoadedSet


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "results",
        metavar="RESULTS",
        help="results directory, results.jsonl, config (.toml: samples come with their prompts), "
        "or a daemon's http://host:port",
    )
    add_token_argument(parser)
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
    from evald.results.sinks.source import open_source
    from evald.results.sinks.stored import open_stored
    from evald.status.report import make_report, render_report

    if args.samples < 0:
        raise EvaldError(f"cannot take {args.samples} samples: give --samples 0 or more")
    source = open_source(args.results, token_file=args.token_file)
    open_samples = open_stored(args.results, token_file=args.token_file)
    sets = _sets(args.results) if args.results.endswith(".toml") and args.samples else []
    try:
        report = make_report(source, open_samples, n_samples=args.samples, sets=sets)
    finally:
        source.close()
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
    if output.exists() and not output.is_file() and not output.is_dir():
        raise EvaldError(f"cannot write {output}: it is no file; name another one with -o")
    output = output.resolve()  # a link stays one
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
