"""kill -9 of the daemon at each named point: ``python -m tests.chaos.kill_points --times 20``.

One world for each point: the daemon is killed there, started again, killed there again; then it
may finish, and the invariants must hold. Prints a table.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

import msgspec

from .__main__ import workers
from .faults import send
from .invariants import check
from .plan import steady_plan
from .points import NAMES, PASSED
from .world import World

#: a life that has not come by the point in this time is asked to stop: some points lie there.
PATIENCE_S = 3.0
#: and so many in a row mean that it comes by no more.
MISSES = 3


class Row(msgspec.Struct, kw_only=True):
    """What became of one point."""

    name: str
    kills: int
    points: int
    breaches: list[str]
    seconds: float


class KillWorld(World):
    """Kills the daemon ``times`` times at the point ``name``."""

    def __init__(self, name: str, times: int) -> None:
        plan = steady_plan(times + 10, pause_s=0.05)
        for action in plan.actions[::4]:
            action.how = "skip"
        super().__init__(plan, room_s=20.0)
        self.kills = 0
        self._name = name
        self._wanted = times
        self._misses = 0
        self._serving_s: float | None = None
        self._asked = False

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        if self.kills < self._wanted and self._misses < MISSES:
            # the first time it comes by, or the second, if there is one
            count = 2 if self.kills % 3 == 1 and not self._misses else 1
            self.next_at = [f"{self._name}:{count}:kill"]
        self._serving_s, self._asked = None, False
        return super()._start_daemon()

    def _judge_exit(self, code: int) -> None:
        if code == -signal.SIGKILL and PASSED in self.log():
            self.kills += 1
            self._misses = 0
            self.give_up = None  # it gets on: the time for the rest begins again
            return
        if self._asked and code in {0, -signal.SIGTERM}:
            self._misses += 1
            return
        super()._judge_exit(code)

    def _do_due(self) -> None:
        super()._do_due()
        if self._asked or self.kills >= self._wanted or self._misses >= MISSES:
            return
        now = time.monotonic()
        if self._serving_s is None and self.serves():
            self._serving_s = now
        if self._serving_s is not None and now > self._serving_s + PATIENCE_S:
            self._asked = True
            send(self.daemon_pid, signal.SIGTERM)

    def open_words(self) -> str:
        if self.kills < self._wanted and self._misses < MISSES:
            return "it is still to be killed"
        return super().open_words()


def kill_at(name: str, times: int) -> Row:
    """Go through one point."""
    started = time.monotonic()
    world = KillWorld(name, times)
    try:
        world.run()
        return Row(
            name=name,
            kills=world.kills,
            points=len(world.points()),
            breaches=check(world),
            seconds=time.monotonic() - started,
        )
    finally:
        world.close()


def main() -> int:
    """Print the table; exit code 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kill_points", allow_abbrev=False)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--point", action="append", choices=NAMES, help="only these")
    args = parser.parse_args()
    names = args.point or NAMES
    failed = 0
    print(f"{'point':24} {'kills':>5} {'points':>6} {'seconds':>7}  invariants")
    with workers(args.jobs) as pool:
        for row in pool.map(lambda name: kill_at(name, args.times), names):
            word = "hold" if not row.breaches else "BROKEN"
            line = f"{row.name:24} {row.kills:5} {row.points:6} {row.seconds:7.1f}  {word}"
            print(line, flush=True)
            for breach in row.breaches:
                print(f"    {breach}", flush=True)
            failed += bool(row.breaches)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
