"""Admission, order, overflow, skips, run end and drain, with a measure that tests can hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from dispatch_room import room

from evald.errors import EvaldError
from evald.point import EvalPoint, Kind, PointKey, SkipReason, Snapshot
from evald.results.records import Accepted, Counts, PointRecord, RunEnd, SetRecord
from evald.staging.offers import InvalidPoint, LostPoint, Offer, RunEnded, TrainerSkip


async def test_points_run_in_order_and_at_most_max_in_flight(tmp_path: Path) -> None:
    async with room(tmp_path, max_in_flight=2) as r:
        for step in (3, 1, 2):
            await r.dispatcher.offer(r.point(step))
        await r.until(lambda: len(r.measure.started) == 2)
        queued, running = r.dispatcher.view()
        assert [p.step for p in queued] == [2]
        assert [p.state for p in running] == ["evaluating", "waiting"]
        assert running[0].sets[0].done == 1
        r.release(1, 2, 3)
        await r.until(lambda: len(r.ends()) == 3)
        assert [x.step for x in r.records if isinstance(x, PointRecord)] == [3, 1, 2]
        assert [x.step for x in r.records if isinstance(x, Accepted)] == [3, 1, 2]
        assert set(r.ends().values()) == {("ok", "")}


async def test_points_that_share_the_engines_end_in_any_order(tmp_path: Path) -> None:
    async with room(tmp_path, max_in_flight=3) as r:
        for step in (1, 2, 3):
            await r.dispatcher.offer(r.point(step))
        await r.until(lambda: len(r.measure.started) == 3)
        states = [p.state for p in r.dispatcher.view()[1]]
        assert states == ["evaluating", "waiting", "waiting"]
        r.measure.spare[1]()
        await r.until(lambda: 2 in r.measure.spare)
        running = r.dispatcher.view()[1]
        assert [p.state for p in running] == ["evaluating", "evaluating", "waiting"]
        assert [p.sets[0].name for p in running[:2]] == ["x1", "x2"]
        r.release(2, 3)
        await r.until(lambda: set(r.ends()) == {2, 3})
        await r.until(lambda: [p.step for p in r.dispatcher.view()[1]] == [1])
        r.release(1)
        await r.until(lambda: len(r.ends()) == 3)
        lags = [x.metrics["eval/lag_steps"] for x in r.records if isinstance(x, PointRecord)]
        assert lags == [1, 0, 2]


async def test_lag_counts_from_the_newest_known_step(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        for step in (10, 14):
            await r.dispatcher.offer(r.point(step))
        r.release(10, 14)
        await r.until(lambda: len(r.ends()) == 2)
        points = [x for x in r.records if isinstance(x, PointRecord)]
        assert [p.metrics["eval/lag_steps"] for p in points] == [4, 0]


async def test_a_known_point_is_not_accepted_twice(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        await r.dispatcher.offer(r.point(1))
        await r.dispatcher.offer(r.point(2))
        r.release(1, 2)
        await r.until(lambda: len(r.ends()) == 2)
        await r.dispatcher.offer(r.point(1))
        assert len(r.records) == 4


async def test_overflow_skip_is_busy_but_never_for_the_final_point(tmp_path: Path) -> None:
    async with room(tmp_path, overflow="skip", max_in_flight=1) as r:
        await r.dispatcher.offer(r.point(1))
        await r.until(lambda: r.measure.started == [1])
        await r.dispatcher.offer(r.point(2))
        await r.dispatcher.offer(r.point(3, final=True))
        r.release(1, 3)
        await r.until(lambda: len(r.ends()) == 3)
        assert r.ends() == {1: ("ok", ""), 2: ("skipped", "busy"), 3: ("ok", "")}


async def test_overflow_latest_supersedes_what_queues(tmp_path: Path) -> None:
    async with room(tmp_path, overflow="latest", max_in_flight=1) as r:
        await r.dispatcher.offer(r.point(1))
        await r.until(lambda: r.measure.started == [1])
        for step in (2, 3):
            await r.dispatcher.offer(r.point(step))
        r.release(1, 2, 3)
        await r.until(lambda: len(r.ends()) == 3)
        assert r.ends() == {1: ("ok", ""), 2: ("skipped", "superseded"), 3: ("ok", "")}


async def test_overflow_latest_goes_by_the_markers_not_by_who_came_first(tmp_path: Path) -> None:
    """Snapshots are read side by side: a small one overtakes the one before it."""
    async with room(tmp_path, overflow="latest", max_in_flight=1) as r:
        await r.dispatcher.offer(r.point(1))
        await r.until(lambda: r.measure.started == [1])
        for step in (3, 2):
            point = r.point(step)
            dated = msgspec.structs.replace(point.snapshot, marker_time=float(step))
            await r.dispatcher.offer(msgspec.structs.replace(point, snapshot=dated))
        await r.until(lambda: bool(r.ends()))
        assert r.ends() == {2: ("skipped", "superseded")}


async def test_overflow_latest_supersedes_while_an_operator_pauses(tmp_path: Path) -> None:
    async with room(tmp_path, overflow="latest") as r:
        r.dispatcher.pause(paused=True)
        for step in (1, 2, 3):
            await r.dispatcher.offer(r.point(step))
        r.dispatcher.pause(paused=False)
        r.release(3)
        await r.until(lambda: len(r.ends()) == 3)
        superseded = ("skipped", "superseded")
        assert r.ends() == {1: superseded, 2: superseded, 3: ("ok", "")}


async def test_without_room_is_no_space_unless_final(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        r.shortage = "the root is full"
        await r.dispatcher.offer(r.point(1))
        await r.dispatcher.offer(r.point(2, final=True))
        r.release(2)
        await r.until(lambda: len(r.ends()) == 2)
        assert r.ends() == {1: ("skipped", "no_space"), 2: ("ok", "")}


async def test_invalid_and_lost_points_end_with_their_sentence(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        await r.dispatcher.offer(InvalidPoint(r.point(1), "tensor x is missing"))
        lost = LostPoint(
            PointKey("r", 2), tmp_path, "gone with the reboot", SkipReason.CKPT_MISSING
        )
        await r.dispatcher.offer(lost)
        assert r.ends() == {1: ("skipped", "invalid_snapshot"), 2: ("skipped", "ckpt_missing")}
        first = r.records[0]
        assert isinstance(first, PointRecord)
        assert first.detail == "tensor x is missing"
        assert first.metrics == {"eval/step": 1, "eval/skipped_invalid_snapshot": 1}


async def test_trainer_skip_is_consumed_once_it_is_durable(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        for _ in range(2):
            path = tmp_path / "root" / "step_5.skip"
            path.touch()
            await r.dispatcher.offer(TrainerSkip(PointKey("r", 5), "export_failed", "disk", path))
            assert not path.exists()
        assert r.ends() == {5: ("skipped", "export_failed")}
        assert len(r.records) == 1


async def test_a_trainers_file_that_cannot_be_removed_costs_nothing(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        path = tmp_path / "a-directory.skip"
        path.mkdir()  # unlink fails
        await r.dispatcher.offer(TrainerSkip(PointKey("r", 5), "busy", "", path))
        assert r.ends() == {5: ("skipped", "busy")}


async def test_nothing_is_removed_in_a_root_that_is_not_owned(tmp_path: Path) -> None:
    async with room(tmp_path, owned=False) as r:
        path = tmp_path / "step_5.skip"
        path.touch()
        await r.dispatcher.offer(TrainerSkip(PointKey("r", 5), "busy", "", path))
        assert path.exists()


async def test_run_end_waits_for_open_points_then_reports(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        end = tmp_path / "root" / "run.end"
        end.touch()
        await r.dispatcher.offer(r.point(7))
        await r.dispatcher.offer(RunEnded("r", 7, end))
        await r.until(lambda: r.measure.started == [7])
        assert not r.ended_runs
        r.release(7)
        await r.until(lambda: r.ended_runs == ["r"])
        assert not end.exists()
        last = r.records[-1]
        assert isinstance(last, RunEnd)
        assert last.points["ok"] == 1


def baseline(run: str) -> EvalPoint:
    snapshot = Snapshot(
        run=run,
        step=-1,
        kind=Kind.BASELINE,
        directory=Path("/base"),
        fingerprint="b",
        size_bytes=1,
        owned=False,
    )
    return EvalPoint(PointKey(run, -1, 0, Kind.BASELINE), snapshot)


async def test_baseline_goes_before_the_first_step_and_only_once(tmp_path: Path) -> None:
    async with room(tmp_path, baseline_of=baseline) as r:
        await r.dispatcher.offer(r.point(1))
        await r.dispatcher.offer(r.point(2))
        r.release(-1, 1, 2)
        await r.until(lambda: len(r.ends()) == 3)
        assert [x.step for x in r.records if isinstance(x, PointRecord)] == [-1, 1, 2]


async def test_drain_starts_nothing_new_and_reports_running_out_of_time(tmp_path: Path) -> None:
    async with room(tmp_path, max_in_flight=1) as r:
        await r.dispatcher.offer(r.point(1))
        await r.dispatcher.offer(r.point(2))
        await r.until(lambda: r.measure.started == [1])
        await r.dispatcher.drain(0.05)
        assert not r.ends()
        r.release(1, 2)
        await r.dispatcher.drain(5)
        assert r.measure.started == [1]
        assert r.ends() == {1: ("ok", "")}


async def test_an_operator_aborts_queued_and_running_points(tmp_path: Path) -> None:
    async with room(tmp_path, max_in_flight=1) as r:
        for step in (1, 2, 3):
            await r.dispatcher.offer(r.point(step))
        await r.until(lambda: r.measure.started == [1])
        record = SetRecord(run="r", step=1, record_id="s", set="x", seconds=1, metrics={},
                           counts=Counts())  # fmt: skip
        await r.ledger.append(record)
        assert r.dispatcher.is_open(PointKey("r", 2))
        assert await r.dispatcher.abort("r", 2, "why") == [PointKey("r", 2)]
        await r.dispatcher.abort("r", 1, "too slow")
        r.release(3)
        await r.until(lambda: len(r.ends()) == 3)
        aborted = ("skipped", "aborted")
        assert r.ends() == {1: aborted, 2: aborted, 3: ("ok", "")}
        point = next(x for x in r.records if isinstance(x, PointRecord) and x.step == 1)
        assert (point.detail, point.void_sets) == ("too slow", ["s"])
        with pytest.raises(EvaldError, match="neither queued nor running"):
            await r.dispatcher.abort("r", 9, "")


async def test_an_operator_holds_back_what_queues(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        r.dispatcher.pause(paused=True)
        await r.dispatcher.offer(r.point(1))
        await asyncio.sleep(0.05)
        assert r.measure.started == []
        r.dispatcher.pause(paused=False)
        r.release(1)
        await r.until(lambda: r.ends() == {1: ("ok", "")})


async def test_admissions_at_the_same_time_keep_the_cap_and_the_baseline_first(
    tmp_path: Path,
) -> None:
    async with room(tmp_path, overflow="skip", max_in_flight=1) as r:
        await asyncio.gather(*(r.dispatcher.offer(r.point(step)) for step in (1, 2, 3)))
        r.release(1)
        await r.until(lambda: len(r.ends()) == 3)
        assert r.ends() == {1: ("ok", ""), 2: ("skipped", "busy"), 3: ("skipped", "busy")}


async def test_a_lost_point_names_the_sets_that_no_longer_stand(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        record = SetRecord(run="r", step=2, record_id="s", set="x", seconds=1, metrics={},
                           counts=Counts())  # fmt: skip
        await r.ledger.append(record)
        await r.dispatcher.offer(
            LostPoint(PointKey("r", 2), tmp_path, "gone", SkipReason.CKPT_MISSING)
        )
        last = r.records[-1]
        assert isinstance(last, PointRecord)
        assert last.void_sets == ["s"]


@pytest.mark.parametrize("request_first", [True, False])
async def test_a_baseline_that_is_configured_and_asked_for_runs_once(
    tmp_path: Path, request_first: bool
) -> None:
    async with room(tmp_path, baseline_of=baseline) as r:
        offers = [baseline("r"), r.point(1)]
        for offer in offers if request_first else reversed(offers):
            await r.dispatcher.offer(offer)
        r.release(-1, 1)
        await r.until(lambda: len(r.ends()) == 2)
        assert sorted(r.measure.started) == [-1, 1]
        assert len([x for x in r.records if isinstance(x, Accepted)]) == 2


async def test_offers_at_the_same_time_give_each_point_one_record(tmp_path: Path) -> None:
    """Every batch of staging offers by itself."""
    async with room(tmp_path, overflow="latest", max_in_flight=1) as r:
        r.release(*range(1, 41))
        offers: list[Offer] = []
        for step in range(1, 21):
            offers += [r.point(step), r.point(step + 20)]
            offers += [TrainerSkip(PointKey("r", step + 100), "busy", "", tmp_path / "x")] * 2
        async with asyncio.TaskGroup() as batches:
            for offer in offers:
                batches.create_task(r.dispatcher.offer(offer))
        await r.until(lambda: len(r.ends()) == 60)
        points = [x for x in r.records if isinstance(x, PointRecord)]
        assert len(points) == 60
        assert {reason for _, reason in r.ends().values()} <= {"", "superseded", "busy"}


async def test_a_detail_is_one_line_that_can_be_shown(tmp_path: Path) -> None:
    async with room(tmp_path) as r:
        await r.dispatcher.offer(InvalidPoint(r.point(1), "a\nb\x1b[31m \udcff " + "x" * 5000))
        (point,) = r.records
        assert isinstance(point, PointRecord)
        assert point.detail.startswith(r"a\nb\x1b[31m \udcff x")
        assert len(point.detail) == 2000
