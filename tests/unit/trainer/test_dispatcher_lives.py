"""Restarts of the job, of the daemon, of both: each point keeps its own bytes, nothing stalls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
from dispatch_rig import Job, Untouchable

from evald.testing import Ending, FakeDaemon


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def digests(job: Job) -> dict[tuple[int, int], str | None]:
    return {(p.step, p.revision): p.digest for p in job.daemon.points()}


# --- the job comes back -------------------------------------------------------------------------


def test_a_crash_before_the_export_costs_no_point_and_mixes_no_weights(job: Job) -> None:
    first = job.dispatcher()
    first.maybe_dispatch(1, "w1")
    job.daemon.turn()
    # step 2 is trained and saved, and the job dies before its export
    second = job.dispatcher()
    assert second.resume(2, "w2").action == "published"
    # it is there before the first new step: nobody can publish later weights under that name
    assert job.snapshots() == {2: "w2"}
    assert second.maybe_dispatch(3, "w3").action == "published"
    assert job.snapshots() == {2: "w2", 3: "w3"}
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert job.ends() == [(1, 0, "ok"), (2, 0, "ok"), (3, 0, "ok")]
    assert len(set(digests(job).values())) == 3


@pytest.mark.parametrize("state", ["staged", "accepted", "listed", "ended"])
def test_what_an_earlier_life_has_given_is_not_exported_again(job: Job, state: str) -> None:
    job.dispatcher().maybe_dispatch(2, "w2")
    if state != "staged":
        job.daemon.scan()
    if state == "listed":
        job.daemon.beat()
        job.daemon.ledger.unlink()  # only the status tells
    if state == "ended":
        job.daemon.end()
    second = job.dispatcher()
    assert second.resume(2, Untouchable()).action == "known"
    assert second.maybe_dispatch(3, "w3").action == "published"
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert job.ends() == [(2, 0, "ok"), (3, 0, "ok")]


def test_resume_is_not_bound_to_the_cadence(job: Job) -> None:
    dispatcher = job.dispatcher(interval=10)
    assert dispatcher.resume(7, "w7").action == "published"
    assert not job.manifest(7)["final"]
    assert job.dispatcher().resume(0, Untouchable()).action == "not_due"  # nothing was completed


def test_resume_from_the_checkpoint_itself(job: Job, tmp_path: Path) -> None:
    dispatcher = job.dispatcher()
    assert dispatcher.resume(7, path=tmp_path).action == "requested"
    assert job.words()["reuse_7.request"]["path"] == str(tmp_path)
    gone = dispatcher.resume(8, path=tmp_path / "gone")
    assert gone.reason == "ckpt_missing"


def test_resume_waits_for_room_and_then_publishes_in_any_case(job: Job) -> None:
    job.dispatcher(max_in_flight=1).maybe_dispatch(1, "w1")
    job.daemon.scan()
    second = job.dispatcher(max_in_flight=1, backpressure_timeout_s=30)
    job.clock.on_sleep = job.daemon.beat
    began = job.clock.now_s
    assert second.resume(2, "w2").action == "published"
    assert job.clock.now_s - began == pytest.approx(30)


def test_what_an_earlier_life_left_counts_against_the_cap(job: Job) -> None:
    first = job.dispatcher()
    first.maybe_dispatch(1, "w1")
    first.maybe_dispatch(2, "w2")
    job.daemon.scan()
    job.daemon.beat()
    first.maybe_dispatch(3, "w3")  # a skip
    shutil.rmtree(job.root / "step_1")
    second = job.dispatcher()
    assert second.maybe_dispatch(4, Untouchable()).reason == "busy"
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert sorted(job.ends()) == [(1, 0, "ok"), (2, 0, "ok"), (3, 0, "busy"), (4, 0, "busy")]


def test_the_status_alone_tells_what_is_in_flight(job: Job) -> None:
    first = job.dispatcher()
    first.maybe_dispatch(1, "w1")
    first.maybe_dispatch(2, "w2")
    job.daemon.scan()
    job.daemon.beat()
    job.daemon.ledger.unlink()
    for step in (1, 2):
        shutil.rmtree(job.root / f"step_{step}")
    assert job.dispatcher().maybe_dispatch(3, Untouchable()).reason == "busy"


def test_other_runs_do_not_count(job: Job) -> None:
    job.exporter.run = "other"
    other = job.dispatcher(run="other")
    other.maybe_dispatch(1, "w1")
    other.maybe_dispatch(2, "w2")
    job.daemon.scan()
    job.daemon.beat()
    other.maybe_dispatch(7, "late")  # not accepted yet
    job.exporter.run = "r"
    assert job.dispatcher().maybe_dispatch(3, "w3").action == "published"


def test_steps_trained_again_are_new_revisions_unless_their_bytes_are_the_same(job: Job) -> None:
    first = job.dispatcher()
    for step in (1, 2):
        first.maybe_dispatch(step, f"w{step}")
        job.daemon.turn()
    second = job.dispatcher()
    assert second.resume(0, "w0").action == "not_due"
    for step, weights in ((1, "w1"), (2, "other")):
        assert second.maybe_dispatch(step, weights).action == "published"
    job.clock.on_sleep = job.daemon.turn
    # equal bytes come to no second record: it is not waited for
    began = job.clock.now_s
    assert second.drain(300)
    assert job.clock.now_s - began < 5
    assert job.ends() == [(1, 0, "ok"), (2, 0, "ok"), (2, 1, "ok")]
    assert second.maybe_dispatch(3, "w3").action == "published"


def test_a_finished_run_that_is_started_again_exports_nothing(job: Job) -> None:
    job.dispatcher(num_steps=2).maybe_dispatch(2, "w2")
    job.daemon.turn()
    again = job.dispatcher(num_steps=2)
    assert again.resume(2, Untouchable()).action == "known"
    assert again.finish(2, Untouchable()).action == "known"


def test_a_last_step_that_was_trained_again_is_a_new_revision(job: Job) -> None:
    job.dispatcher(interval=9).finish(2, "w2")
    job.daemon.turn()
    again = job.dispatcher(interval=9)
    assert again.resume(1, "w1").action == "published"
    assert again.finish(2, "other").action == "published"
    job.clock.on_sleep = job.daemon.turn
    assert again.drain(60)
    assert job.ends() == [(2, 0, "ok"), (1, 0, "ok"), (2, 1, "ok")]


# --- the daemon goes and comes ------------------------------------------------------------------


def events(logs: list[structlog.typing.EventDict], name: str) -> int:
    return sum(entry["event"] == name for entry in logs)


def test_a_missing_daemon_gets_points_up_to_the_cap_and_is_told_once(job: Job) -> None:
    with structlog.testing.capture_logs() as logs:
        dispatcher = job.dispatcher(overflow="backpressure")
        began = job.clock.now_s
        results = [dispatcher.maybe_dispatch(step, "w") for step in range(1, 7)]
    assert [result.action for result in results] == ["published"] * 2 + ["skipped"] * 4
    assert {result.reason for result in results[2:]} == {"unhealthy"}
    # it was looked out for once, not for each step
    assert job.clock.now_s - began == pytest.approx(10, abs=1.5)
    assert events(logs, "daemon_away") == 1
    # the daemon starts at last, and finds everything
    job.clock.on_sleep = job.daemon.turn
    job.daemon.beat()
    assert dispatcher.drain(100)
    assert sorted(job.ends()) == [(1, 0, "ok"), (2, 0, "ok")] + [
        (step, 0, "unhealthy") for step in range(3, 7)
    ]


def test_a_beat_that_stands_still_ends_the_wait(job: Job) -> None:
    with structlog.testing.capture_logs() as logs:
        dispatcher = job.dispatcher(overflow="backpressure", max_in_flight=1)
        job.daemon.beat()
        dispatcher.maybe_dispatch(1, "w1")
        job.daemon.scan()
        job.daemon.beat()
        began = job.clock.now_s
        first = dispatcher.maybe_dispatch(2, Untouchable())
        waited_s = job.clock.now_s - began
        second = dispatcher.maybe_dispatch(3, Untouchable())
        assert job.clock.now_s - began == waited_s  # known to be dead: no second wait
    assert (first.reason, second.reason) == ("unhealthy", "unhealthy")
    assert waited_s == pytest.approx(10, abs=1.5)
    assert events(logs, "daemon_away") == 1
    # a new daemon goes on; the log says so once
    with structlog.testing.capture_logs() as logs:
        job.daemon = FakeDaemon(job.root, job.results, cap=1)
        job.daemon.beat()
        job.daemon.turn()
        assert dispatcher.maybe_dispatch(4, "w4").action == "published"
        job.daemon.turn()
        assert dispatcher.maybe_dispatch(5, "w5").action == "published"
    assert events(logs, "daemon_back") == 1
    assert events(logs, "daemon_away") == 0


def test_a_daemon_that_died_long_ago_is_not_waited_for(job: Job) -> None:
    dispatcher = job.dispatcher(overflow="backpressure", max_in_flight=1)
    job.daemon.beat()
    dispatcher.maybe_dispatch(1, "w1")
    job.clock.now_s += 600  # training, between two looks
    began = job.clock.now_s
    assert dispatcher.maybe_dispatch(2, Untouchable()).reason == "unhealthy"
    assert job.clock.now_s == began


class DarkLink:
    """A host that swallows every packet: each question costs its whole timeout."""

    restarts = 0
    where = "somewhere"

    def __init__(self, job: Job) -> None:
        self._job = job
        self.asked = 0

    def status(self) -> None:
        self.asked += 1
        self._job.clock.now_s += 5.0

    def records(self, after: int) -> list[dict[str, Any]]:
        assert after == 0
        self._job.clock.now_s += 5.0
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_a_host_that_cannot_be_reached_does_not_cost_each_step_its_timeout(job: Job) -> None:
    link = DarkLink(job)
    dispatcher = job.dispatcher(link=link, results=None)
    for step in range(1, 101):
        began = job.clock.now_s
        dispatcher.maybe_dispatch(step, "w")
        assert job.clock.now_s - began <= 10.0
        dispatcher.poll()
        job.clock.now_s += 3.0  # training
    assert link.asked <= 6  # about once a minute


def test_a_link_that_fails_is_no_end_of_the_training(job: Job) -> None:
    class Broken:
        restarts = 0

        def status(self) -> None:
            raise RuntimeError("a bug of the link")

    dispatcher = job.dispatcher(link=Broken(), results=None)
    assert dispatcher.baseline().action == "skipped"
    failed = dispatcher.maybe_dispatch(1, Untouchable())
    assert (failed.reason, job.words()["step_1.skip"]["reason"]) == ("export_failed",) * 2
    assert dispatcher.poll() == []
    assert dispatcher.drain(1).detail == "cannot drain: a bug of the link"


def test_a_daemon_that_sees_nothing_of_a_point_is_told_of(job: Job) -> None:
    dispatcher = job.dispatcher(marker=".other", max_in_flight=9)
    job.clock.on_sleep = job.daemon.beat
    dispatcher.maybe_dispatch(1, "w1")
    (job.root / "step_1" / ".complete").rename(job.root / "step_1" / ".other")
    with structlog.testing.capture_logs() as logs:
        assert not dispatcher.drain(500)
    assert events(logs, "point_not_seen") == 1


def test_drain_ends_early_with_the_reason_when_the_daemon_is_dead(job: Job) -> None:
    dispatcher = job.dispatcher()
    dispatcher.baseline()
    dispatcher.maybe_dispatch(1, "w1")
    job.daemon.scan()
    job.daemon.end()
    job.daemon.beat()
    drained = dispatcher.drain(1000)
    assert not drained
    assert drained.missing == ("step 1",)
    assert drained.detail == (
        "1 point has no record, and the daemon has shown no sign of life for 10 s"
    )
    job.clock.on_sleep = job.daemon.beat
    late = dispatcher.drain(5)
    assert late.detail == "1 point has no record, and 5 s are over"
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(5).missing == ()


def test_a_ledger_that_began_anew_is_read_from_its_start(job: Job) -> None:
    dispatcher = job.dispatcher(max_in_flight=1)
    for step in (1, 2, 3):
        assert dispatcher.maybe_dispatch(step, f"w{step}").action == "published"
        job.daemon.turn()
    dispatcher.poll()
    job.daemon.ledger.rename(job.results / "old")
    job.daemon = FakeDaemon(job.root, job.results)
    for step in (4, 5, 6):
        assert dispatcher.maybe_dispatch(step, f"w{step}").action == "published"
        for _ in range(3):
            job.daemon.turn()
            dispatcher.poll()
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)


# --- results ------------------------------------------------------------------------------------


def test_poll_returns_each_new_record_of_the_run_once(job: Job) -> None:
    job.dispatcher().maybe_dispatch(1, "w1")
    job.daemon.turn()
    dispatcher = job.dispatcher()
    assert dispatcher.poll() == []  # what an earlier life has seen is no news
    job.daemon.script(2, Ending(metrics={"eval/a": 0.5}))
    dispatcher.maybe_dispatch(2, "w2")
    assert dispatcher.poll() == []
    job.daemon.turn()
    seen: list[str] = []
    news = dispatcher.poll(lambda record: seen.append(record["type"]))
    assert seen == [record["type"] for record in news] == ["set", "point"]
    assert news[1]["metrics"] == {"eval/step": 2.0, "eval/a": 0.5}
    assert dispatcher.poll() == []
    # an earlier seq brings what came while the job was down
    later = job.dispatcher(after_seq=dispatcher.seq - 1)
    assert [record["type"] for record in later.poll()] == ["point"]
    # other runs' records are not ours
    job.exporter.run = "other"
    job.dispatcher(run="other").maybe_dispatch(9, "w9")
    job.daemon.turn()
    assert dispatcher.poll() == []


def test_poll_knows_own_points_that_ended_before_the_first_contact(job: Job) -> None:
    job.dispatcher().maybe_dispatch(1, "w1")
    job.daemon.turn()
    (job.root / ".evald" / "status.json").unlink()
    ledger = job.daemon.ledger.rename(job.results / "away")
    dispatcher = job.dispatcher()
    dispatcher.maybe_dispatch(2, "w2")
    ledger.rename(job.daemon.ledger)
    job.daemon.turn()
    assert [(r["type"], r["step"]) for r in dispatcher.poll()] == [("set", 2), ("point", 2)]


@pytest.mark.parametrize("in_folder", [False, True])
def test_without_a_run_id_the_points_are_the_daemons_run(tmp_path: Path, in_folder: bool) -> None:
    job = Job(tmp_path)
    job.exporter.run = None
    job.daemon.beat()
    if in_folder:
        # the daemon serves the folder's parent, and names the run after the folder
        job.daemon = FakeDaemon(job.root, job.results, run="night-7")
        job.daemon.beat()
        (job.root / ".evald").rename(tmp_path / ".evald")
        job.root = job.exporter.root = job.root.rename(tmp_path / "night-7")
        job.daemon.root = job.root
    with job.dispatcher(run=None) as dispatcher:
        dispatcher.maybe_dispatch(1, "w1")
        job.daemon.scan()
        job.daemon.end()
        assert [record["step"] for record in dispatcher.poll()] == [1, 1]
        assert dispatcher.drain(60)
