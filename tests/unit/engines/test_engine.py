"""What an engine and its campaign decide without any server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from evald.config import Fleet
from evald.engines.api import EngineUnreachable
from evald.engines.engine import SLACK_S, Engine, Order, Upkeep
from evald.engines.launcher import Boot, Launched
from evald.engines.pin import PinFailed, PinStage, Proof
from evald.engines.readiness import layout_of, may_move
from evald.engines.state import RestartPolicy, State
from evald.engines.supervision import Supervisor
from evald.errors import EvaldError, SnapshotGone
from evald.point import PinTarget
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes

TARGET = PinTarget(run="demo", step=1, digest="ab" * 16, directory=Path("/snapshots/step_1"))


class Silent:
    """A fleet that listens and has no opinion."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    def capacity_freed(self) -> None:
        pass

    def capacity_grown(self) -> None:
        pass

    def emptied(self) -> None:
        pass

    def pinned(self, engine: Engine, order: Order, proof: Proof) -> None:
        pass

    def pin_failed(self, engine: Engine, order: Order, error: PinFailed | SnapshotGone) -> bool:
        del engine, order, error
        return False

    def other_version(self, engine: Engine, order: Order, served: str | None) -> None:
        pass


class Refusing:
    """A launcher that never succeeds."""

    def __init__(self, error: Exception) -> None:
        self.attempts: list[int] = []
        self.error = error

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        assert boot is None
        self.attempts.append(attempt)
        raise self.error

    def log_fault(self) -> str:
        return ""


def engine(name: str = "engine-0", **upkeep: Any) -> Engine:
    return Engine(
        name,
        Fleet(model="/m", device="cpu", engines=1),
        Upkeep(start_timeout_s=5.0, **upkeep),
        events=Silent(),
    )


def supervised(one: Engine, launcher: Refusing | None = None) -> Supervisor:
    return Supervisor(one, launcher or Refusing(EvaldError("no")), rng=lambda: 0.5)


async def until_state(one: Engine, state: State) -> None:
    async with asyncio.timeout(30):
        while one.state is not state:
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("error", [EvaldError("no interpreter"), OSError("no interpreter")])
async def test_launches_that_fail_end_in_quarantine_until_an_operator_releases_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartPolicy, "FIRST_S", 0.001)
    launcher = Refusing(error)
    one = engine()
    async with running(supervised(one, launcher)):
        await until_state(one, State.QUARANTINED)
        assert launcher.attempts == [1, 2, 3, 4, 5]
        view = one.view()
        assert view.restarts == 5
        assert view.detail == "cannot launch: no interpreter"
        assert view.pid is None
        with pytest.raises(EvaldError, match="it is in quarantine; release it instead"):
            one.restart()
        one.release()
        await until_state(one, State.BACKOFF)
        with pytest.raises(EvaldError, match=r"it is (backoff|starting), not in quarantine"):
            one.release()
        await until_state(one, State.QUARANTINED)  # it has its five attempts again
        assert len(launcher.attempts) == 10
    assert one.view().state == "quarantined"


async def test_cancelled_in_backoff_is_stopped() -> None:
    one = engine()
    async with running(supervised(one)):
        await until_state(one, State.BACKOFF)
        assert not one.alive
    assert one.view().state == "stopped"


async def test_a_restart_by_hand_does_not_wait_for_the_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RestartPolicy, "FIRST_S", 1000.0)
    one, launcher = engine(), Refusing(EvaldError("no"))
    async with running(supervised(one, launcher)):
        await until_state(one, State.BACKOFF)
        one.restart()
        async with asyncio.timeout(30):
            while len(launcher.attempts) < 2:
                await asyncio.sleep(0.002)


async def test_servers_of_others_are_never_quarantined_nor_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RestartPolicy, "FIRST_S", 0.0001)
    monkeypatch.setattr(RestartPolicy, "LOOK_AGAIN_S", 0.001)
    one, launcher = engine(owned=False), Refusing(EvaldError("no"))
    async with running(supervised(one, launcher)):
        async with asyncio.timeout(30):
            while len(launcher.attempts) < 20:
                await asyncio.sleep(0.002)
        with pytest.raises(EvaldError, match="evald did not start it"):
            one.restart()
    assert one.view().state == "stopped"


def test_a_bug_in_a_launcher_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(supervised(engine(), Refusing(ZeroDivisionError())).run())


async def test_without_a_server_there_is_no_api() -> None:
    one = engine()
    with pytest.raises(EngineUnreachable, match="engine-0 is down"):
        one.connected_api()
    one.abort_soon(["q/1/0/"])  # nothing to abort, nothing happens


def test_engines_of_another_layout_are_not_compared() -> None:
    two = {"tp_size": 2, "pp_size": 1, "dtype": "auto", "port": 1}
    assert layout_of(two) == layout_of(two | {"port": 2})
    assert layout_of(two) != layout_of(two | {"tp_size": 4})
    assert layout_of({})


# --- who is to blame ------------------------------------------------------------------------------


def campaign(*, scouting: bool = False, attempts: int = 2) -> Campaign:
    return Campaign(TARGET, attempts=attempts, scouting=scouting)


def alive(name: str = "engine-0") -> Engine:
    one = engine(name=name)
    one.machine.transition(State.STARTING)
    one.machine.transition(State.READY)
    return one


LOAD_FAILED = PinFailed(PinStage.LOAD, "connection failed")
PROOF = Proof(weight_version="demo:1:abababab:1", checksum="c")


def test_two_failures_make_the_snapshot_suspect_and_a_living_engine_convicts_it() -> None:
    one = campaign()
    assert not one.add_failure("engine-0", LOAD_FAILED)
    assert (one.open, one.suspect) == (True, False)
    assert one.verdict([alive()]) is None
    assert not one.add_failure("engine-0", LOAD_FAILED)
    assert (one.open, one.suspect) == (False, True)
    assert one.verdict([engine()]) is None  # the base model does not load either
    violation = one.verdict([engine(), alive("engine-1")])
    assert violation is not None
    assert violation.reason == "pin_violation"
    assert violation.detail == (
        "cannot pin snapshot step_1: 2 attempts failed (on engine-0) while the base model loads; "
        "the last one on engine-0 at stage load: connection failed"
    )


def test_no_verdict_while_another_engine_still_tries() -> None:
    one = campaign(attempts=1)
    one.add_failure("engine-0", LOAD_FAILED)
    trying = alive("engine-1")
    trying.pinning = one.order
    assert one.verdict([alive(), trying]) is None


def test_after_a_proof_failures_are_the_engines_fault() -> None:
    one = campaign(scouting=True)
    assert (one.scouting, one.verified) == (True, False)
    one.add_proof("engine-0", PROOF)
    assert (one.scouting, one.verified) == (False, True)
    assert one.pin.weight_versions == {"engine-0": PROOF.weight_version}
    for _ in range(5):
        assert one.add_failure("engine-1", LOAD_FAILED, served=True)
    assert one.has_failed("engine-1")
    assert not one.has_failed("engine-0")
    assert not one.suspect
    assert one.open
    assert one.verdict([alive()]) is None


def test_failures_after_a_proof_while_nobody_serves_are_the_snapshots() -> None:
    one = campaign()
    one.add_failure("engine-0", LOAD_FAILED)
    one.add_proof("engine-0", PROOF)
    assert one.add_failure("engine-0", LOAD_FAILED)
    assert one.open
    assert not one.add_failure("engine-1", LOAD_FAILED)
    assert (one.open, one.wants_engines) == (False, True)
    assert one.gone is not None
    assert "loaded before, and since then 2 attempts failed" in one.gone.detail


def test_a_failed_drain_is_the_engines_fault() -> None:
    one = campaign(attempts=1)
    assert one.add_failure("engine-0", PinFailed(PinStage.DRAIN, "hangs"))
    assert not one.suspect


def test_a_vanished_snapshot_closes_the_campaign() -> None:
    one = campaign()
    assert not one.add_failure("engine-0", SnapshotGone("gone"))
    assert one.gone is not None
    assert not one.open
    assert one.verdict([alive()]) is None


def test_the_time_without_a_serving_engine_counts_from_its_end() -> None:
    now = [5.0]
    one = Campaign(TARGET, attempts=2, scouting=False, clock=lambda: now[0])
    seen = []
    one.note_serving([alive()], starved=False)
    seen.append(one.down_since)  # never served yet: pin() has its own clock
    one.add_proof("engine-0", PROOF)
    one.note_serving([alive()], starved=False)
    seen.append(one.down_since)
    now[0] = 9.0
    one.note_serving([alive()], starved=False)
    seen.append(one.down_since)
    serving = alive()
    serving.machine.transition(State.PINNING)
    serving.machine.transition(State.SERVING)
    serving.pinned = one.order
    one.note_serving([serving], starved=False)
    seen.append(one.down_since)
    assert seen == [None, 5.0, 5.0, None]


async def test_a_change_between_look_and_wait_is_not_lost() -> None:
    changes = Changes()
    ticket = changes.ticket()
    changes.notify()
    async with asyncio.timeout(1.0):
        await changes.wait(ticket, 60.0)
    await changes.wait(changes.ticket(), 0.01)  # no change: returns at the deadline


def test_an_engine_that_stays_in_a_state_beyond_all_timeouts_stands_still() -> None:
    now = 0.0
    one = Engine(
        "engine-0",
        Fleet(model="/m", load_timeout_s=100, drain_timeout_s=10),
        Upkeep(start_timeout_s=1000, stop_grace_s=10),
        events=Silent(),
        clock=lambda: now,
    )
    now = 1e6
    assert one.pulse.overdue(1) == ""  # none is wanted
    one.machine.transition(State.STARTING)
    now += 1000 + 10 + 10 + 2 * 100 + SLACK_S
    assert one.pulse.overdue(1) == ""
    now += 1
    assert one.pulse.overdue(1).startswith("engine-0: 'starting' since 1521 s")
    one.machine.transition(State.UNHEALTHY)
    assert one.pulse.overdue(1) == ""
    one.machine.transition(State.QUARANTINED)
    now += 1e9
    assert one.pulse.overdue(1) == ""  # an operator has to look


@pytest.mark.parametrize(
    ("info", "moves"),
    [
        ({}, True),
        ({"enable_deterministic_inference": False, "speculative_algorithm": None}, True),
        ({"enable_deterministic_inference": True}, False),
        ({"speculative_algorithm": "EAGLE3"}, False),
    ],
)
def test_answers_move_only_where_an_abort_leaves_no_trace(
    info: dict[str, Any], moves: bool
) -> None:
    assert may_move(info) is moves
