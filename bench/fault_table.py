"""Every fault of SGLang that a supervisor can meet, and what evald makes of it: a table.

Drives whole daemons with real SGLang servers on the CPU through each row: provokes the fault (most
of them in the middle of a point), waits until the point has ended and a snapshot is served again,
and compares with what evald promises. Seconds are from the fault to "serving" again, the start of a
new server included. Goal: every row as promised, else the exit code is 1. The last line is JSON.

``--quick`` plays the rows that a fake engine can play on fake engines, in less than a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from fault_rows import GROUPS, Group, Row
from fault_stage import DOWN, Stage

from evald.results.records import PointRecord

#: how a server is replaced, in one word.
RESTART = " > backoff > starting > ready"
#: status.json is at most this old.
STATUS_AGE_S = 1.2
HEADINGS = (
    "fault",
    "the engine's states",
    "s",
    "the point",
    "scored",
    "digests",
    "orphans",
    "left",
)


class Line(msgspec.Struct):
    """What became of a row; ``problems`` are sentences, none when all is as promised."""

    row: Row
    states: str = ""
    #: from the fault to "serving".
    seconds: float | None = None
    end: str = "-"
    scored: str = "-"
    digests: int = 0
    #: processes, and files of shared memory.
    orphans: int = 0
    left: int = 0
    detail: str = ""
    problems: list[str] = msgspec.field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        """Show the line under HEADINGS."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        counts = (self.digests, self.orphans, self.left)
        return (self.row.did, self.states, seconds, self.end, self.scored, *map(str, counts))


def main() -> int:
    """Run the rows; 1 when one is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fake engines, less than a minute")
    parser.add_argument("--rows", help="only these, by name: NAME,...")
    parser.add_argument("--keep", action="store_true", help="leave logs and results in /tmp")
    args = parser.parse_args()
    known = {row.name for group in GROUPS for row in group.rows}
    wanted = set(args.rows.split(",")) if args.rows else known
    if unknown := wanted - known:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    began = time.monotonic()
    lines: list[Line] = []
    for group in GROUPS:
        chosen = [r for r in group.rows if r.name in wanted and (r.quick or not args.quick)]
        if chosen:
            lines += run_group(group, chosen, real=not args.quick, keep=args.keep)
    print("\n" + "\n".join(table([HEADINGS, *[line.cells() for line in lines]])))
    print(f"restart: {RESTART.removeprefix(' > ')}")
    unexpected = [line for line in lines if line.problems]
    for line in unexpected:
        print(f"NOT AS PROMISED: {line.row.name}: {'; '.join(line.problems)}")
    figures = {
        "name": "fault_table",
        "engines": "fake" if args.quick else "sglang",
        "rows": len(lines),
        "orphans": sum(line.orphans for line in lines),
        "left_in_shared_memory": sum(line.left for line in lines),
        "unexpected": len(unexpected),
        "slowest_recovery_s": round(max((line.seconds or 0.0 for line in lines), default=0.0), 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    return 1 if unexpected or not lines else 0


def run_group(group: Group, rows: list[Row], *, real: bool, keep: bool) -> list[Line]:
    """Play rows on one daemon, one after the other; what fails fails its row alone."""
    work = Path(tempfile.mkdtemp(prefix="evald-faults-"))
    stage = Stage(
        work,
        real=real,
        questions=group.questions if real else group.questions // 4 + 1,
        staging=group.staging,
        start_s=group.start_s if real else 5.0,
    )
    lines: list[Line] = []
    steps = itertools.count(1)
    try:
        stage.rig.start()
        for row in rows:
            line = Line(row)
            lines.append(line)
            try:
                stage.until_up()
                run_row(stage, line, steps)
            except (TimeoutError, OSError, RuntimeError, LookupError) as error:
                line.problems.append(f"{type(error).__name__}: {error}")
            said = "; ".join(line.problems) or "as promised"
            print(f"{row.name}: {' | '.join(line.cells())}: {said}. {line.detail}", flush=True)
        try:
            stage.stop()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            lines[-1].problems.append(str(error))
        # what the end of the daemon leaves is on the last row's account
        count(stage, lines[-1])
    finally:
        stage.close(keep=keep)
    return lines


def run_row(stage: Stage, line: Line, steps: Iterator[int]) -> None:
    """Provoke the fault, wait until it is over, and compare."""
    row = line.row
    pid, restarts = stage.launcher(), stage.status()["restarts"]
    subject = next(steps)
    row.act(stage, subject)
    point = stage.point(subject)
    line.end = point.reason or str(point.outcome)
    line.detail = point.detail
    line.scored = f"{point.counts.n_scored}/{point.counts.n_total}"
    if line.end != row.end:
        line.problems.append(f"the point ended {line.end}, not {row.end}: {point.detail}")
    if line.end == "ok":
        line.digests, problems = check_samples(stage, point)
        line.problems += problems
    if row.down:
        stage.wait(lambda: row.down in stage.path(), f"the engine is {row.down}")
    if not stage.recovered() or line.end != "ok":
        stage.drop(after := next(steps))
        point = stage.point(after)
        if str(point.outcome) != "ok":
            line.problems.append(f"the snapshot after it ended {point.outcome}: {point.detail}")
        else:
            line.problems += check_samples(stage, point)[1]
    judge(stage, line, replaced=stage.launcher() != pid)
    if row.down == "tainted":
        time.sleep(STATUS_AGE_S)
        if counted := stage.status()["restarts"] - restarts:
            line.problems.append(f"{counted} restarts count against an engine that is not at fault")


def judge(stage: Stage, line: Line, *, replaced: bool) -> None:
    """Compare the states that the engine has passed, and look for what is left."""
    path = stage.path()
    line.states = " > ".join(path).replace(RESTART, " > restart")
    serving = [change for change in stage.changes() if change.new == "serving"]
    if serving and stage.recovered():
        line.seconds = stage.seconds_until(serving[-1])
    elif line.row.down:
        line.problems.append("the engine does not serve again")
    down = DOWN & set(path)
    if not line.row.down and (down or replaced):
        line.problems.append(f"the engine was touched ({', '.join(down) or 'a new process'})")
    elif line.row.down and not (line.row.down in down and replaced):
        line.problems.append(f"the engine was not {line.row.down} and replaced")
    count(stage, line)


def check_samples(stage: Stage, point: PointRecord) -> tuple[int, list[str]]:
    """Compare a point's journal with its record; how many digests it has, and what is wrong."""
    samples, digest = stage.samples(point.step), str(point.digest)
    scored = [sample for sample in samples if sample.status == "scored"]
    keys = {(sample.config, sample.question, sample.sample) for sample in scored}
    problems = []
    total = point.counts.n_total
    if not point.counts.n_scored == total == len(scored) == len(keys) > 0:
        counts = f"{point.counts.n_scored} in the record, {len(scored)} in the journal"
        problems.append(
            f"{total} samples, of which scored: {counts}, {len(keys)} of them different"
        )
    if any(f":{digest[:8]}:" not in sample.weight_version for sample in samples):
        problems.append("samples have weight versions of another digest")
    digests = {sample.digest for sample in samples}
    if digests != {digest}:
        problems.append(f"samples have {len(digests)} digests")
    return len(digests), problems


def count(stage: Stage, line: Line) -> None:
    """Add processes and shared memory that are left behind."""
    orphans, left = stage.orphans(), stage.leftovers()
    line.orphans += len(orphans)
    line.left += len(left)
    if orphans:
        line.problems.append(f"processes are left: {orphans}")
    if left:
        line.problems.append(f"shared memory is left: {left}")


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lay out rows as Markdown, readable as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


if __name__ == "__main__":
    raise SystemExit(main())
