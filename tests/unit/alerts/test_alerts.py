"""What is told, once: across restarts, other rules, and a ledger that cannot be written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from evald.alerts import alerts as module
from evald.alerts.alerts import Alerts
from evald.alerts.comparing import Comparing, Watched
from evald.alerts.verdict import Rule
from evald.alerts.watching import Disk, Quarantined, Silent
from evald.config import AlertRule, Results
from evald.point import Outcome
from evald.results.ledger import Ledger
from evald.results.records import Accepted, Alert, AnyRecord, PointRecord, RunEnd, decode
from evald.status.view import DiskView, EngineView, StatusView


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.2)


class Poster:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def give(self, alert: Alert, *, time_s: float) -> None:
        assert time_s > 0
        self.given.append(f"{alert.name} {alert.subject} {alert.cleared}")

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def flush(self) -> None:
        pass


class FullDisk:
    """A ledger that cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_seq = 0

    async def append(self, _record: AnyRecord) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class World:
    """A ledger, a status that tests set, and what watches both."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.engines = [EngineView(name="e0", state="serving")]
        self.free = 1000
        self.poster = Poster()
        self.ledger: Any = None

    def view(self) -> StatusView:
        return StatusView(
            version="1", pid=1, beat=1, time=0.0, uptime_s=1e6, state="serving", run="a",
            results="/r", cap=2, engines=self.engines,
            disk=DiskView(results_free_bytes=self.free, results_total_bytes=1000),
        )  # fmt: skip

    @asynccontextmanager
    async def life(
        self, *rules: Rule, full: bool = False, before: Sequence[float] = ()
    ) -> AsyncIterator[Alerts]:
        """One life of the daemon; points of these values are recorded while it begins."""
        path = self.work / "results.jsonl"
        self.ledger = FullDisk(path) if full else Ledger.open(Results(dir=str(self.work)))
        alerts = Alerts(
            rules,
            run="a",
            ledger=self.ledger,
            view=self.view,
            poster=self.poster,  # type: ignore[arg-type] # it quacks
        )
        for step, value in enumerate(before):
            await self.point(step, value)
        task = asyncio.create_task(alerts.run())
        try:
            yield alerts
            assert not task.done()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.ledger.close()

    async def point(self, step: int, value: float, run: str = "a") -> None:
        metrics = {"eval/x": value, "eval/x/stderr": 0.01}
        record_id = f"{run}/step/{step}/r0"
        await self.ledger.append(
            PointRecord(
                run=run, step=step, record_id=record_id, outcome=Outcome.OK, metrics=metrics
            )
        )

    def alerts(self) -> list[str]:
        lines = (self.work / "results.jsonl").read_bytes().splitlines()
        records: list[AnyRecord] = [decode(line) for line in lines]
        return [record.record_id for record in records if isinstance(record, Alert)]


async def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def settled(world: World, alerts: list[str]) -> None:
    """Wait for these, and see that no more come."""
    await until(lambda: world.alerts() == alerts, f"{alerts}")
    await asyncio.sleep(0.06)
    assert world.alerts() == alerts


def drop(against: Any = "best", name: str = "fell") -> Comparing:
    rule = AlertRule(name=name, kind="drop", against=against)
    return Comparing(rule, [Watched(metric="eval/x", sign=-1, sets=["x"])])


def quarantined() -> Quarantined:
    return Quarantined(AlertRule(name="engines", kind="quarantined"))


@pytest.mark.parametrize("while_it_learns", [0, 5])
async def test_a_condition_is_told_once_and_once_that_it_is_over(
    tmp_path: Path, while_it_learns: int
) -> None:
    world = World(tmp_path)
    values = (0.9, 0.5, 0.5, 0.89, 0.5)
    with structlog.testing.capture_logs() as logs:
        async with world.life(drop(), before=values[:while_it_learns]):
            for step, value in enumerate(values[while_it_learns:]):
                await world.point(step, value)
            first = "a/alert/fell/eval/x/1"
            await settled(world, [first, f"{first}/cleared", "a/alert/fell/eval/x/2"])
    assert world.poster.given == [
        "fell eval/x False", "fell eval/x True", "fell eval/x False"
    ]  # fmt: skip
    events = [entry["event"] for entry in logs if entry["event"].startswith("alert")]
    assert events == ["alert", "alert_over", "alert"]


async def test_a_restart_tells_nothing_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    told = ["a/alert/fell/eval/x/1", "a/alert/step/eval/x@1.r0/1", "a/alert/engines/e0/1"]
    async with world.life(drop(), drop("previous", "step"), quarantined()):
        await world.point(0, 0.9)
        await world.point(1, 0.5)
        await settled(world, told[:2])
        world.engines[0].state = "quarantined"
        await settled(world, told)
    world.engines[0].state = "starting"
    async with world.life(drop(), drop("previous", "step"), quarantined()):
        await world.point(2, 0.5)
        await settled(world, told)
        world.engines[0].state = "serving"
        await settled(world, [*told, "a/alert/engines/e0/1/cleared"])
        world.engines[0].state = "quarantined"
        await settled(world, [*told, "a/alert/engines/e0/1/cleared", "a/alert/engines/e0/2"])


async def test_what_an_earlier_life_did_not_come_to_tell_is_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life():
        for step, value in enumerate((0.9, 0.5, 0.9, 0.5)):
            await world.point(step, value)
        await world.point(0, 0.9, run="old")
        await world.point(1, 0.5, run="old")
        await world.ledger.append(RunEnd(run="old", step=1, record_id="old/run_end", points={}))
    # of the past only the newest point of a run that goes on
    async with world.life(drop("previous")):
        await settled(world, ["a/alert/fell/eval/x@3.r0/1"])


async def test_other_rules_while_it_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life(drop("previous")) as alerts:
        await world.point(0, 0.9)
        await world.point(1, 0.5)
        await settled(world, ["a/alert/fell/eval/x@1.r0/1"])
        alerts.use([drop("best", "low")])
        await settled(world, ["a/alert/fell/eval/x@1.r0/1", "a/alert/low/eval/x/1"])
        alerts.use([drop("previous"), drop("best", "low")])
        await settled(world, ["a/alert/fell/eval/x@1.r0/1", "a/alert/low/eval/x/1"])
        alerts.use([])
        await world.point(2, 0.1)
        await settled(world, ["a/alert/fell/eval/x@1.r0/1", "a/alert/low/eval/x/1"])


async def test_evalds_own_alerts_reach_the_webhook_if_a_rule_asks(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def alert(name: str) -> None:
        await world.ledger.append(
            Alert(run="a", step=0, record_id=f"a/alert/{name}/1", name=name, detail="d")
        )

    rule = Rule(AlertRule(name="b", kind="builtin", names=["best_not_kept"]))
    async with world.life(rule):
        await alert("best_not_kept")
        await alert("snapshot_closed")
        await until(lambda: world.poster.given, "posted")
    async with world.life(Rule(AlertRule(name="b", kind="builtin"))):  # not those of before
        await alert("snapshot_doubtful")
        await until(lambda: len(world.poster.given) > 1, "posted")
        await asyncio.sleep(0.05)
    assert world.poster.given == ["best_not_kept  False", "snapshot_doubtful  False"]


async def test_a_rule_can_keep_to_the_ledger(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.free = 1
    rule = Disk(AlertRule(name="room", kind="disk", below_bytes=10, webhook=False))
    async with world.life(rule):
        await settled(world, ["a/alert/room/results/1"])
    assert world.poster.given == []


async def test_a_full_disk_is_posted_though_nothing_can_be_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.free = 1
    room = Disk(AlertRule(name="room", kind="disk", below_bytes=10))
    async with world.life(room, quarantined(), full=True):
        await until(lambda: world.poster.given, "posted")
        # what follows does not wait for it either
        world.engines[0].state = "quarantined"
        await until(lambda: len(world.poster.given) == 2, "posted")
        begun = time.monotonic()
    assert time.monotonic() - begun < 10  # a stop does not wait for the disk
    assert world.poster.given == ["room results False", "engines e0 False"]


async def test_the_last_words_are_recorded(tmp_path: Path) -> None:
    """The end of the last engine stops the daemon at once."""
    world = World(tmp_path)
    async with world.life(quarantined()):
        await world.point(0, 0.5)
        await asyncio.sleep(0.05)
        world.engines[0].state = "quarantined"
    assert world.alerts() == ["a/alert/engines/e0/1"]


async def test_the_last_point_before_a_stop_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --exit-on-run-end the daemon stops at once, and the run is over for the next life."""
    world = World(tmp_path)
    monkeypatch.setattr(module, "LOOK_S", 60)
    async with world.life(drop()):
        await world.point(0, 0.9)
        await asyncio.sleep(0.05)  # (it looks for the last time)
        await world.point(1, 0.5)
        await world.ledger.append(RunEnd(run="a", step=1, record_id="a/run_end/1", points={}))
    assert world.alerts() == ["a/alert/fell/eval/x/1"]
    assert world.poster.given == ["fell eval/x False"]


async def test_rules_that_have_not_learnt_yet_say_nothing(tmp_path: Path) -> None:
    """Two reloads in a row: the second comes while the rules of the first still learn."""
    world = World(tmp_path)

    def silent() -> Silent:
        return Silent(AlertRule(name="silent", kind="silent", after_s=600))

    async with world.life(silent()) as alerts:
        alerts._wall = lambda: time.time() + 3600
        await world.ledger.append(
            Accepted(
                run="a", step=1, record_id="a/1", directory="/d", size_bytes=1, fingerprint="f"
            )
        )
        await settled(world, ["a/alert/silent/points/1"])
        read = alerts._read

        def read_and_reload() -> Any:
            lines = read()
            if lines:
                alerts.use([silent()])
                alerts._read = read  # type: ignore[method-assign] # once
            return lines

        alerts._read = read_and_reload  # type: ignore[method-assign] # as a slow disk would
        alerts.use([silent()])
        await settled(world, ["a/alert/silent/points/1"])
