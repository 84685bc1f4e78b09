"""Many points in one daemon: ``python -m tests.chaos.many_points --points 2000``.

Prints what the daemon holds (memory, descriptors, threads, tasks) along the way; exit code 1 when
the last tenth holds more than the second by more than the index of the points explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from .invariants import check
from .plan import steady_plan
from .world import World

#: what one ended point may keep in memory: its state in the index, and room for the allocator.
POINT_BYTES, ROOM_BYTES = 4096, 8 << 20
#: descriptors, threads and tasks that come and go.
ROOM = 6
FIELDS = ("rss_bytes", "descriptors", "threads", "tasks")


def _growth(lines: list[dict[str, float]], points: int) -> list[str]:
    tenth = max(len(lines) // 10, 1)
    faults = []
    for field in FIELDS:
        early = statistics.median(line[field] for line in lines[tenth : 2 * tenth])
        late = statistics.median(line[field] for line in lines[-tenth:])
        allowed = POINT_BYTES * points + ROOM_BYTES if field == "rss_bytes" else ROOM
        if late - early > allowed:
            faults.append(f"{field} grew from {early:.0f} to {late:.0f}")
    return faults


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.many_points", allow_abbrev=False)
    parser.add_argument("--points", type=int, default=2000)
    args = parser.parse_args()
    plan = steady_plan(args.points)
    world = World(plan, room_s=60.0)
    counts = world.places.work / "counts"
    world.add_words("--count-into", str(counts))
    try:
        world.run()
        breaches = check(world)
        lines = [json.loads(line) for line in counts.read_text().splitlines()]
        ended = [str(point.outcome) for point in world.points()]
    finally:
        world.close()
    print(f"{'second':>7} {'MB':>7} {'descriptors':>11} {'threads':>7} {'tasks':>6}")
    for line in lines[:: max(len(lines) // 20, 1)] + lines[-1:]:
        second = line["time"] - lines[0]["time"]
        print(
            f"{second:7.0f} {line['rss_bytes'] / 1e6:7.1f} {line['descriptors']:11} "
            f"{line['threads']:7} {line['tasks']:6}"
        )
    print(f"{len(ended)} points, {ended.count('ok')} ok")
    breaches += _growth(lines, args.points)
    for breach in breaches:
        print(f"  {breach}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
