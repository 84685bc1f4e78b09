"""The ceiling of ``fleet_overlap``: the same load on the same decode model, without an evald.

An engine is pinned in ``pin_s`` and has work at once: nothing here costs a poll, a request or a
processor. Run on its own it prints, for several sizes of a point, how many times as many points per
hour rolling pins and moved stragglers give as one point at a time; it has no goal of its own. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from evald.testing.decode_model import Decode, DecodeModel

Arm = Literal["serial", "rolling", "consolidated"]
ARMS: tuple[Arm, ...] = ("serial", "rolling", "consolidated")


class Simulated(msgspec.Struct, frozen=True):
    """What came out."""

    wall_s: float
    #: shares of all engines' time, and of all their slots'.
    busy: float
    slots: float
    moved: int


class _Engine:
    def __init__(self, decode: Decode) -> None:
        self.model = DecodeModel(decode)
        #: the point that it serves, or is being pinned to.
        self.point: int | None = None
        self.pinned_s = 0.0
        #: (point, tokens it still wants) by request.
        self.requests: dict[int, int] = {}

    def room(self) -> int:
        return self.model.decode.slots - len(self.requests)


class _Fleet:
    def __init__(self, points: Sequence[Sequence[int]], decode: Decode, engines: int) -> None:
        self.engines = [_Engine(decode) for _ in range(engines)]
        #: what was not handed out yet, and what has not ended, by point.
        self.unfed = [list(lengths) for lengths in points]
        self.open = [len(lengths) for lengths in points]
        self.now_s = 0.0
        self.keys = 0
        self.moved = 0

    def run(self, *, in_flight: int, pin_s: float, consolidate: bool) -> Simulated:
        while any(self.open):
            self._assign(in_flight, pin_s, consolidate=consolidate)
            self._feed()
            self._step()
        usages = [engine.model.usage for engine in self.engines]
        time_s = self.now_s * len(usages)
        slots = self.engines[0].model.decode.slots
        return Simulated(
            wall_s=self.now_s,
            busy=sum(usage.busy_s for usage in usages) / time_s,
            slots=sum(usage.slot_s for usage in usages) / time_s / slots,
            moved=self.moved,
        )

    def _assign(self, in_flight: int, pin_s: float, *, consolidate: bool) -> None:
        """Give each engine that its point does not need to the oldest one that wants it."""
        begun = [point for point, left in enumerate(self.open) if left][:in_flight]
        for point in begun:
            for _ in self.engines:
                coming = sum(e.room() for e in self.engines if e.point == point)
                if len(self.unfed[point]) <= coming:
                    break
                free = [e for e in self.engines if not e.requests and not self._wanted(e)]
                if not free and consolidate:
                    free = self._emptied()
                if not free:
                    return
                free[0].point, free[0].pinned_s = point, self.now_s + pin_s

    def _wanted(self, engine: _Engine) -> bool:
        """Whether it is on its way to work, or has more of it to come."""
        return engine.point is not None and bool(self.unfed[engine.point])

    def _emptied(self) -> list[_Engine]:
        """Move the fewest stragglers that fit beside others of their point."""
        for engine in sorted(self.engines, key=lambda e: len(e.requests)):
            others = [e for e in self.engines if e.point == engine.point and e is not engine]
            if self._wanted(engine) or len(engine.requests) > sum(e.room() for e in others):
                continue
            engine.model.advance(self.now_s)
            for key in list(engine.requests):
                left = engine.requests.pop(key) - engine.model.abort(key)
                self._start(max(others, key=_Engine.room), left)
                self.moved += 1
            return [engine]
        return []

    def _feed(self) -> None:
        for point, unfed in enumerate(self.unfed):
            serving = [e for e in self.engines if e.point == point and e.pinned_s <= self.now_s]
            while unfed and serving:
                engine = max(serving, key=_Engine.room)
                if not engine.room():
                    break
                self._start(engine, unfed.pop())

    def _start(self, engine: _Engine, tokens: int) -> None:
        self.keys += 1
        engine.requests[self.keys] = tokens
        engine.model.advance(self.now_s)
        engine.model.enter(self.keys, tokens)

    def _step(self) -> None:
        """Go on to the next thing that happens."""
        nexts = [e.model.next_end_s() for e in self.engines]
        nexts += [e.pinned_s for e in self.engines if e.pinned_s > self.now_s]
        self.now_s = min(one for one in nexts if one is not None)
        for engine in self.engines:
            for key in engine.model.advance(self.now_s):
                del engine.requests[key]
                self.open[engine.point or 0] -= 1


def simulate(
    points: Sequence[Sequence[int]],
    arm: Arm,
    *,
    decode: Decode,
    engines: int = 8,
    pin_s: float = 1.0,
    in_flight: int = 1000,
) -> Simulated:
    """Run points, each with the lengths of its responses; serial: one point at a time."""
    return _Fleet(points, decode, engines).run(
        in_flight=1 if arm == "serial" else in_flight,
        pin_s=pin_s,
        consolidate=arm == "consolidated",
    )


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="with four points under way only")
    args = parser.parse_args()
    decode = Decode(step_s=0.008)
    for in_flight in (4,) if args.quick else (2, 4, 1000):
        for requests in (240, 480, 960, 1920, 3840):
            points = [draw(requests, seed) for seed in range(10)]
            done = {arm: simulate(points, arm, decode=decode, in_flight=in_flight) for arm in ARMS}
            serial_s, moved = done["serial"].wall_s, done["consolidated"].moved
            row: dict[str, float | str] = {"name": "fleet_simulation", "in_flight": in_flight}
            row |= {"requests": requests, "moved": moved}
            row |= {str(arm): round(serial_s / done[arm].wall_s, 2) for arm in ARMS}
            print(json.dumps(row))


def draw(requests: int, seed: int, cap: int = 16384) -> list[int]:
    """Draw the lengths of one point's responses."""
    rng = random.Random(seed)  # noqa: S311 - test data, no secret
    sigma = math.log(20) / 2.326
    return [min(round(400 * rng.lognormvariate(0, sigma)), cap) for _ in range(requests)]


if __name__ == "__main__":
    main()
