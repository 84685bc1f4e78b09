"""``evald status``: what the running daemon is doing."""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
from typing import TYPE_CHECKING

import msgspec

from evald.commands import target

if TYPE_CHECKING:
    from evald.status.view import EngineView, PointView, RegradeView, SetView, StatusView

WIDTH = 80
BAR = 20
EXIT_NOT_RUNNING = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help=target.HELP)
    target.add_token_argument(parser)
    parser.add_argument("--json", action="store_true", help="the whole status as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the status; 3 if no daemon is running."""
    from evald.status.client import NotRunning, fetch_status

    try:
        view = asyncio.run(fetch_status(target.find(args)))
    except NotRunning as error:
        print(f"evald: {error}", file=sys.stderr)
        return EXIT_NOT_RUNNING
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(view)).decode())
    else:
        print("\n".join(_cut(line) for line in render(view)))
    return 0


def render(view: StatusView) -> list[str]:
    """Return the status as lines for people."""
    lines = [
        f"evald {view.version}  {view.state}  run {view.run}  pid {view.pid}  up "
        + _duration(view.uptime_s),
        f"results  {view.results} (seq {view.last_seq})",
    ]
    if view.not_written:
        lines += textwrap.wrap(f"PAUSED: {view.not_written}", WIDTH)
    if view.listen is not None:
        lines += [f"listens  {view.listen} (with its token)"]
    if (staging := view.staging) is not None:
        used, free = _size(staging.used_bytes), _size(staging.free_bytes)
        known = f"{staging.snapshots} snapshots, {used} used, {free} free"
        lines += [f"staging  {staging.root}: {known}"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in view.ended.items())
    lines += [f"ended    {counts or 'none'}"]
    lines += ["engines" if view.engines else "engines  none"]
    lines += [_engine(engine) for engine in view.engines]
    lines += [f"running ({len(view.running)} of {view.cap})"]
    for point in view.running:
        lines += [_point(point), *(_set(progress) for progress in point.sets)]
    lines += [f"queued ({len(view.queued)})"]
    lines += [_point(point) for point in view.queued]
    lines += [_regrade(one) for one in view.regrades if one.state == "running"]
    return lines


def _engine(engine: EngineView) -> str:
    weights = engine.weight_version or "-"
    restarts = f"  {engine.restarts} restarts" if engine.restarts else ""
    detail = f"  {engine.detail}" if engine.detail else ""
    return (
        f"  {engine.name:<10} {engine.state:<11} {engine.in_flight:>4} in flight  "
        f"{weights}{restarts}{detail}"
    )


def _point(point: PointView) -> str:
    label = f"{point.kind} {point.step}" + (f" r{point.revision}" if point.revision else "")
    return f"  {point.run} {label:<14} {point.state:<11} {_duration(point.since_s)}"


def _set(progress: SetView) -> str:
    share = progress.done / progress.total if progress.total else 0.0
    bar = ("#" * round(share * BAR)).ljust(BAR, ".")
    score = "" if progress.score is None else f"  score {progress.score:.3f}"
    return f"    {progress.name:<20} {bar} {progress.done:>6}/{progress.total}{score}"


def _regrade(one: RegradeView) -> str:
    return (
        f"regrade  run {one.run}: {one.points_done} of {one.points} points, and "
        f"{one.samples_done} of {one.samples} samples of the next one"
    )


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _size(n_bytes: int) -> str:
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004 - the step between the units
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
