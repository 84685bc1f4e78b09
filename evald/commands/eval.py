"""``evald eval CONFIG DIR --step N``: one point, without a daemon and without its ledger."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evald.config import Config
    from evald.results.records import PointRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    parser.add_argument("directory", type=Path, metavar="DIR", help="snapshot; needs no marker")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step of the point")
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="OUT",
        help="keep samples and engine logs in this directory (default: a temporary one)",
    )
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning"])


def run(args: argparse.Namespace) -> int:
    """Evaluate; exit code 0 for outcome ok, 1 for partial or skipped, 78 for a bad config."""
    import msgspec
    import uvloop

    from evald.config_load import load_config
    from evald.log import configure_logging

    config = load_config(args.config)
    configure_logging(args.log_level)
    with ExitStack() as stack:
        out = args.samples or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="evald-"))
        )
        results = msgspec.structs.replace(config.results, dir=str(out.resolve()))
        config = msgspec.structs.replace(config, results=results)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            record = runner.run(_evaluate(config, args.directory.resolve(), args.step))
    record.time = time.time()
    if args.json:
        print(msgspec.json.encode(record).decode())
    else:
        print("\n".join(_table(record)))
    return 0 if record.outcome == "ok" else 1


async def _evaluate(config: Config, directory: Path, step: int) -> PointRecord:
    from evald.errors import EvaldError
    from evald.judge import skipped_record
    from evald.measure import Measure
    from evald.point import EvalPoint, PointKey, Snapshot
    from evald.postures.build import build_posture
    from evald.preflight import preflight
    from evald.results.index import PointIndex
    from evald.staging.digest import fingerprint
    from evald.staging.intake import check_snapshot

    checked = await asyncio.to_thread(preflight, config, keep_data=True)
    marker = config.staging.marker
    key = PointKey(config.run, step)
    try:
        seen, size_bytes = await asyncio.to_thread(fingerprint, directory, marker)
    except FileNotFoundError as error:
        raise EvaldError(f"cannot evaluate {directory}: there is no such directory") from error
    point = EvalPoint(
        key,
        Snapshot(
            run=key.run,
            step=step,
            directory=directory,
            fingerprint=seen,
            size_bytes=size_bytes,
            owned=False,
        ),
    )
    fault = await asyncio.to_thread(check_snapshot, config.staging, directory, checked.base)
    if fault is not None:
        return skipped_record(point, "invalid_snapshot", fault)
    posture = build_posture(config, checked, PointIndex())
    engines = asyncio.create_task(posture.run(), name="engines")
    turn = asyncio.Event()
    turn.set()
    measure = Measure(config.dispatch, posture=posture, marker=marker)
    try:
        point_task = asyncio.create_task(
            measure.run(
                point,
                queued_s=0.0,
                turn=turn,
                on_spare=lambda: None,
                on_state=_ignore,
                on_set=_ignore_set,
            ),
            name=f"point {key}",
        )
        await asyncio.wait({engines, point_task}, return_when=asyncio.FIRST_COMPLETED)
        if not point_task.done():
            point_task.cancel()
            engines.result()  # raises what ended the engines
        return await point_task
    finally:
        engines.cancel()
        await asyncio.gather(engines, return_exceptions=True)
        await posture.close()


def _ignore(_state: str) -> None:
    """Show no progress."""


async def _ignore_set(_record: object) -> None:
    """Leave sets to the terminal record."""


def _table(record: PointRecord) -> list[str]:
    head = f"{record.run} step {record.step}: {record.outcome}"
    if record.reason:
        head += f" ({record.reason})"
    lines = [head]
    if record.detail:
        lines.append(record.detail)
    names = record.provenance.get("sets", {})
    if record.metrics and names:
        lines.append(f"{'set':<24} {'score':>8} {'stderr':>8} {'truncated':>10} {'tokens':>8}")
    for name in names:
        key = f"eval/{name}"
        cells = (
            record.metrics.get(key, float("nan")),
            record.metrics.get(f"{key}/stderr", float("nan")),
            record.metrics.get(f"{key}-truncated_ratio", float("nan")),
            record.metrics.get(f"{key}/response_len/mean", float("nan")),
        )
        lines.append(f"{name:<24} {cells[0]:8.4f} {cells[1]:8.4f} {cells[2]:10.4f} {cells[3]:8.1f}")
    counts = record.counts
    lines.append(
        f"{counts.n_scored} of {counts.n_total} samples scored, {record.timings.total_s:.1f} s "
        f"(pin {record.timings.pin_s:.1f} s, evaluation {record.timings.evaluate_s:.1f} s)"
    )
    return lines
