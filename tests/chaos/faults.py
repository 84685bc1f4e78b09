"""The table of faults: what can happen to a run, and how often it does."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from . import disk
from .points import NAMES

if TYPE_CHECKING:
    from .world import World


class Kind(msgspec.Struct, frozen=True):
    """One row: how often it is drawn, and what it does."""

    weight: int
    hit: Callable[[World, random.Random], None]
    #: the daemon may end by itself: its results directory or its engines fail it.
    may_end_daemon: bool = False
    #: only fake engines can be told to do it.
    fake_only: bool = False


FAULTS: dict[str, Kind] = {}


def fault(
    weight: int, *, may_end_daemon: bool = False, fake_only: bool = False
) -> Callable[[Callable[[World, random.Random], None]], Callable[[World, random.Random], None]]:
    """Enter a function into the table."""

    def enter(
        hit: Callable[[World, random.Random], None],
    ) -> Callable[[World, random.Random], None]:
        FAULTS[hit.__name__] = Kind(weight, hit, may_end_daemon, fake_only)
        return hit

    return enter


def send(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to what may have ended."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze(world: World, rng: random.Random, pid: int | None) -> None:
    """Let a process stand still for a while."""
    send(pid, signal.SIGSTOP)
    world.later(rng.uniform(0.1, 2.0), lambda: send(pid, signal.SIGCONT))


# --- processes -----------------------------------------------------------------------------------


@fault(4)
def kill_daemon(world: World, _rng: random.Random) -> None:
    send(world.daemon_pid, signal.SIGKILL)


@fault(6)
def kill_daemon_at_point(world: World, rng: random.Random) -> None:
    """The next life ends at a named point."""
    world.next_at.append(f"{rng.choice(NAMES)}:{rng.choice([1, 1, 2, 3, 5])}:kill")
    send(world.daemon_pid, signal.SIGKILL)


@fault(2)
def slow_at_point(world: World, rng: random.Random) -> None:
    world.next_at.append(f"{rng.choice(NAMES)}:{rng.choice([1, 2, 3])}:slow")
    send(world.daemon_pid, signal.SIGKILL)


@fault(2)
def term_daemon(world: World, rng: random.Random) -> None:
    send(world.daemon_pid, signal.SIGTERM)
    if rng.random() < 0.3:
        world.later(0.1, lambda: send(world.daemon_pid, signal.SIGTERM))


@fault(2)
def stop_daemon(world: World, rng: random.Random) -> None:
    freeze(world, rng, world.daemon_pid)


@fault(3)
def kill_engine(world: World, rng: random.Random) -> None:
    send(world.pick(rng, "engine"), rng.choice([signal.SIGKILL, signal.SIGTERM]))


@fault(2)
def stop_engine(world: World, rng: random.Random) -> None:
    freeze(world, rng, world.pick(rng, "engine"))


@fault(2)
def kill_guard(world: World, rng: random.Random) -> None:
    send(world.pick(rng, "guard"), rng.choice([signal.SIGKILL, signal.SIGTERM]))


@fault(1)
def stop_guard(world: World, rng: random.Random) -> None:
    freeze(world, rng, world.pick(rng, "guard"))


@fault(2)
def kill_worker(world: World, rng: random.Random) -> None:
    send(world.pick(rng, "worker"), signal.SIGKILL)


@fault(3)
def kill_trainer(world: World, rng: random.Random) -> None:
    send(world.trainer_pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))


@fault(1)
def stop_trainer(world: World, rng: random.Random) -> None:
    freeze(world, rng, world.trainer_pid)


@fault(1)
def reboot(world: World, _rng: random.Random) -> None:
    """The machine goes down: no process is left, and nothing on tmpfs."""
    world.reboot()


# --- disks ---------------------------------------------------------------------------------------


@fault(2)
def full_root(world: World, rng: random.Random) -> None:
    filler = world.places.fill(world.places.root)
    if filler is not None:
        world.later(rng.uniform(0.2, 1.5), lambda: filler.unlink(missing_ok=True))


@fault(2, may_end_daemon=True)
def full_results(world: World, rng: random.Random) -> None:
    filler = world.places.fill(world.places.results)
    if filler is not None:
        world.later(rng.uniform(0.2, 1.5), lambda: filler.unlink(missing_ok=True))


def _break_disk(world: World, rng: random.Random, under: object, ops: list[str]) -> None:
    name = rng.choice(["EIO", "EACCES", "ENOSPC", "EROFS"])
    content = {"under": str(under), "ops": ops, "errno": name}
    world.set_control("disk", json.dumps(content), rng.uniform(0.1, 1.0))


@fault(2, may_end_daemon=True)
def broken_results(world: World, rng: random.Random) -> None:
    """The ledger and the samples cannot be written."""
    op = rng.choice(["write", "fdatasync", "open", "ftruncate"])
    _break_disk(world, rng, world.places.results, [op])


@fault(2, may_end_daemon=True)
def broken_root(world: World, rng: random.Random) -> None:
    """Snapshots cannot be read, moved or deleted."""
    op = rng.choice(["open", "scandir", "unlink", "rmdir", *disk.PAIRS])
    _break_disk(world, rng, world.places.root, [op])


@fault(2)
def slow_disk(world: World, rng: random.Random) -> None:
    content = {"under": str(world.places.work), "ops": list(disk.OPS[:6]), "slow_s": 0.05}
    world.set_control("disk", json.dumps(content), rng.uniform(0.2, 1.5))


# --- engines' answers ----------------------------------------------------------------------------

#: path -> what may go wrong there. (A load that changes weights on the way, or takes the label and
#: loads nothing, cannot be told from a good one by one engine alone.)
_GENERAL = ["drop", "busy", "too_many", "fail", "hang", "trickle", "cut", "die"]
_ANSWERS = {
    "/generate": [*_GENERAL, "wrong_label", "wrong_rid", "abort", "reject"],
    "/update_weights_from_disk": [*_GENERAL, "wrong_label"],
    "/model_info": _GENERAL,
    "/weights_checker": _GENERAL,
    "/abort_request": _GENERAL,
    "/health_generate": _GENERAL,
}


@fault(5, fake_only=True)
def bad_answers(world: World, rng: random.Random) -> None:
    path = rng.choice(list(_ANSWERS))
    names = rng.choices(_ANSWERS[path], k=rng.randint(1, 3))
    world.script_engines({path: names})


@fault(2, fake_only=True)
def storm_of_refusals(world: World, rng: random.Random) -> None:
    """Twenty answers 429 or 503 in a row."""
    world.script_engines({"/generate": [rng.choice(["too_many", "busy"])] * 20})


@fault(1, fake_only=True)
def nan_canary(world: World, _rng: random.Random) -> None:
    world.script_engines({"/generate": ["nan"]})


# --- clock and root ------------------------------------------------------------------------------


@fault(2)
def clock_jump(world: World, rng: random.Random) -> None:
    world.set_control("clock", str(rng.choice([-86400.0, -3600.0, 3600.0, 4e7])))


@fault(1)
def clutter(world: World, rng: random.Random) -> None:
    """Ten thousand files of somebody else lie in the root."""
    with suppress(OSError):
        for number in range(10_000):
            (world.places.root / f"core.{number}").touch()
    world.later(rng.uniform(0.5, 2.0), world.tidy_root)


@fault(2)
def damage(world: World, rng: random.Random) -> None:
    """A snapshot that has its marker loses half of its weights, or goes."""
    world.damage(rng)
