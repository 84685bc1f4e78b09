"""What a due step becomes: a snapshot, a skip before any export, a request; and how a run ends."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from dispatch_rig import Job, Untouchable

from evald.results.records import RunEnd
from evald.trainer.contract import ExportError, NoSpace
from evald.trainer.publish import StillEvaluating


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_due_steps_are_published_and_others_cost_nothing(job: Job) -> None:
    with job.dispatcher(interval=2, num_steps=5) as dispatcher:
        actions = []
        for step in range(1, 6):
            weights = f"w{step}" if step in {2, 4, 5} else Untouchable()
            actions.append(dispatcher.maybe_dispatch(step, weights).action)
            job.daemon.turn()
        assert actions == ["not_due", "published", "not_due", "published", "published"]
        assert dispatcher.finish(5).action == "known"
        job.clock.on_sleep = job.daemon.turn
        assert dispatcher.drain(60)
    job.daemon.turn()
    assert job.ends() == [(2, 0, "ok"), (4, 0, "ok"), (5, 0, "ok")]
    assert job.exporter.steps == [2, 4, 5]
    assert isinstance(job.daemon.records()[-1], RunEnd)


def test_the_last_snapshot_is_marked_final(job: Job) -> None:
    dispatcher = job.dispatcher(num_steps=2)
    dispatcher.maybe_dispatch(1, "w1")
    dispatcher.maybe_dispatch(2, "w2")
    assert [job.manifest(step)["final"] for step in (1, 2)] == [False, True]


def test_a_step_is_given_once_and_again_when_the_job_went_back(job: Job) -> None:
    dispatcher = job.dispatcher(interval=2)
    assert dispatcher.maybe_dispatch(2, "a").action == "published"
    assert dispatcher.maybe_dispatch(2, "a", epoch_end=True).action == "known"
    assert dispatcher.maybe_dispatch(3, "b").action == "not_due"
    assert dispatcher.maybe_dispatch(3, "b", epoch_end=True).action == "published"
    job.daemon.turn()
    job.daemon.turn()
    assert dispatcher.maybe_dispatch(2, "c").action == "published"
    job.daemon.turn()
    assert job.ends() == [(2, 0, "ok"), (3, 0, "ok"), (2, 1, "ok")]


def test_going_back_to_a_step_whose_point_is_pending_takes_no_second(job: Job) -> None:
    dispatcher = job.dispatcher()
    dispatcher.maybe_dispatch(2, "a")
    job.daemon.scan()
    dispatcher.maybe_dispatch(1, "b")
    went_back = dispatcher.maybe_dispatch(2, Untouchable())
    assert (went_back.action, went_back.reason) == ("skipped", "busy")
    assert "step_2.skip" not in job.words()  # the step has its point


# --- the cap ------------------------------------------------------------------------------------


def test_at_the_cap_the_skip_is_written_before_anything_is_touched(job: Job) -> None:
    dispatcher = job.dispatcher()
    for step in (1, 2):
        dispatcher.maybe_dispatch(step, f"w{step}")
    job.daemon.scan()
    job.daemon.beat()
    skipped = dispatcher.maybe_dispatch(3, Untouchable())
    assert (skipped.action, skipped.reason) == ("skipped", "busy")
    assert skipped.detail == "2 points are in flight, and the cap is 2"
    assert job.words()["step_3.skip"] == {
        "run": "r",
        "reason": "busy",
        "detail": "2 points are in flight, and the cap is 2",
    }
    assert job.exporter.steps == [1, 2]
    # a skip takes no room, and the next end makes room
    job.daemon.turn()
    assert dispatcher.maybe_dispatch(4, "w4").action == "published"
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)
    assert sorted(job.ends()) == [(1, 0, "ok"), (2, 0, "ok"), (3, 0, "busy"), (4, 0, "ok")]


@pytest.mark.parametrize(("cap", "own", "expected"), [(1, None, 1), (3, None, 3), (3, 2, 2)])
def test_the_cap_is_the_daemons_unless_given(
    tmp_path: Path, cap: int, own: int | None, expected: int
) -> None:
    job = Job(tmp_path, cap=cap)
    job.daemon.beat()
    dispatcher = job.dispatcher(max_in_flight=own)
    given = [dispatcher.maybe_dispatch(step, "w").action for step in range(1, 6)]
    assert given.count("published") == expected


def test_backpressure_waits_for_the_oldest(job: Job) -> None:
    dispatcher = job.dispatcher(overflow="backpressure", max_in_flight=1)
    dispatcher.maybe_dispatch(1, "w1")
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        job.daemon.scan()
        job.daemon.beat()
        if turns == 5:
            job.daemon.end()

    job.clock.on_sleep = turn
    assert dispatcher.maybe_dispatch(2, "w2").action == "published"
    assert turns == 5
    assert job.ends() == [(1, 0, "ok")]


def test_backpressure_gives_up_in_time(job: Job) -> None:
    dispatcher = job.dispatcher(overflow="backpressure", max_in_flight=1, backpressure_timeout_s=30)
    dispatcher.maybe_dispatch(1, "w1")
    job.clock.on_sleep = job.daemon.beat
    began = job.clock.now_s
    skipped = dispatcher.maybe_dispatch(2, Untouchable())
    assert skipped.reason == "busy"
    assert job.clock.now_s - began == pytest.approx(30)
    assert skipped.detail == "1 point is in flight after 30 s of waiting, and the cap is 1"


# --- space and failures -------------------------------------------------------------------------


def test_no_room_is_a_skip_before_the_export(job: Job) -> None:
    with (job.base / "large.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # a hole: nothing is on the disk
    dispatcher = job.dispatcher()
    skipped = dispatcher.maybe_dispatch(1, iter([]))
    assert skipped.reason == "no_space"
    assert "takes about 4.44e+03 GB" in skipped.detail
    assert job.words()["step_1.skip"]["reason"] == "no_space"
    assert job.exporter.steps == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"free_bytes": 10}, "the staging root .* has 1e-05 MB free"),
        ({"max_bytes": 60_000}, "0 MB of staging.max_bytes = 60000 are used; raise it"),
        ({"max_bytes": 70_000}, ""),
    ],
)
def test_the_daemons_room_counts_too(job: Job, settings: dict[str, int], words: str) -> None:
    (job.base / "model.safetensors").write_bytes(b"0123456789")
    for name, value in ({"free_bytes": 1 << 40} | settings).items():
        setattr(job.daemon, name, value)
    if "free_bytes" in settings:
        (job.base / "model.safetensors").write_bytes(b"0123456789!")
    job.daemon.beat()
    result = job.dispatcher().maybe_dispatch(1, iter([]))
    if words:
        assert result.reason == "no_space"
        assert re.search(words, result.detail)
    else:
        assert result.action == "published"


@pytest.mark.parametrize(
    ("fault", "reason", "detail"),
    [
        (ExportError("cannot export: names differ"), "export_failed", "cannot export: names diff"),
        (NoSpace("cannot write shard 3: full"), "no_space", "cannot write shard 3"),
        (OSError(errno.ENOSPC, "No space left"), "no_space", "step 1: the file system is full"),
        (StillEvaluating("cannot publish step 1 again"), "busy", "cannot publish step 1 again"),
        (RuntimeError("CUDA error"), "export_failed", "step 1: RuntimeError: CUDA error"),
        (ValueError("no weights at all"), "export_failed", "step 1: ValueError: no weights"),
    ],
)
def test_a_failed_export_is_a_skip_at_its_step(
    job: Job, fault: Exception, reason: str, detail: str
) -> None:
    job.exporter.faults.append(fault)
    dispatcher = job.dispatcher()
    failed = dispatcher.maybe_dispatch(1, "w1")
    assert (failed.action, failed.reason) == ("skipped", reason)
    assert detail in failed.detail
    assert dispatcher.maybe_dispatch(2, "w2").action == "published"
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)
    assert job.ends() == [(1, 0, reason), (2, 0, "ok")]
    assert detail in job.daemon.points()[0].detail


def test_interrupts_are_not_swallowed(job: Job) -> None:
    class Interrupting:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.dispatcher().maybe_dispatch(1, Interrupting())


def test_a_word_that_cannot_be_written_is_written_later(job: Job) -> None:
    dispatcher = job.dispatcher(interval=2)
    job.exporter.faults += [NoSpace("full"), NoSpace("still full")]
    job.root.rmdir()
    job.root.write_text("in the way")  # as a file system that takes nothing
    assert dispatcher.maybe_dispatch(2, "w").reason == "no_space"
    assert dispatcher.maybe_dispatch(4, "w").reason == "no_space"
    assert not dispatcher.drain(1)
    job.root.unlink()
    assert dispatcher.maybe_dispatch(5).action == "not_due"
    assert {name: word["detail"] for name, word in job.words().items()} == {
        "step_2.skip": "full",
        "step_4.skip": "still full",
    }
