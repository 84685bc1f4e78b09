"""A job that runs again, on a root where another has been: whose points are whose, and how soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from dispatch_rig import Job, Untouchable

from evald.point import SkipReason
from evald.staging.digest import content_digest
from evald.testing import FakeDaemon
from evald.trainer.contract import ExportError
from evald.trainer.dispatcher.staged import published_digest
from evald.trainer.publish import publish


def build(folder: Path) -> None:
    """Write a snapshot, as any trainer might."""
    (folder / "model.safetensors").write_text("1")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def polled(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["step"], one["revision"]) for one in records if one["type"] == "point"]


# --- the same bytes once more -------------------------------------------------------------------


def test_what_was_answered_before_takes_no_room_and_no_time(job: Job) -> None:
    first = job.dispatcher()
    for step in (1, 2, 3, 4):
        first.maybe_dispatch(step, f"w{step}")
        job.daemon.turn()
    second = job.dispatcher()
    second.resume(0)
    began = job.clock.now_s
    for step in (1, 2, 3, 4, 5):
        # the daemon is busy with other things: it has not even looked
        result = second.maybe_dispatch(step, f"w{step}")
        assert result.action == "published", result.detail
    assert polled(second.poll()) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert job.clock.now_s - began < 5
    assert polled(second.poll()) == [(5, 0)]
    assert job.ends() == [(step, 0, "ok") for step in (1, 2, 3, 4, 5)]


def test_a_point_that_is_measured_now_answers_the_same_bytes_as_well(job: Job) -> None:
    job.dispatcher().maybe_dispatch(1, "w1")
    job.daemon.scan()  # accepted, and the job dies
    second = job.dispatcher()
    assert second.maybe_dispatch(1, "w1").action in {"published", "skipped"}
    assert second.maybe_dispatch(2, "w2").action == "published"
    job.clock.on_sleep = job.daemon.turn
    began = job.clock.now_s
    assert second.drain(60)
    assert job.clock.now_s - began < 5
    assert (1, 0) in polled(second.poll())


def test_a_skip_answers_no_bytes(job: Job) -> None:
    first = job.dispatcher()
    job.exporter.faults.append(ExportError("the disk fell over"))
    assert first.maybe_dispatch(1, "w1").reason == "export_failed"
    job.daemon.turn()
    second = job.dispatcher()
    assert second.maybe_dispatch(1, "w1").action == "published"
    assert polled(second.poll()) == []
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert polled(second.poll()) == [(1, 1)]


def test_a_request_that_was_answered_before_ends_when_it_is_taken(tmp_path: Path) -> None:
    job = Job(tmp_path)
    saved = tmp_path / "saved_{step}"
    for step in (1, 2):
        Path(str(saved).replace("{step}", str(step))).mkdir()
        Path(str(saved).replace("{step}", str(step)), "model.safetensors").write_text(f"w{step}")
    reuse = {"mode": "reuse", "save_interval": 1, "checkpoint_path": str(saved), "exporter": None}
    first = job.dispatcher(**reuse)
    job.clock.on_sleep = job.daemon.turn
    for step in (1, 2):
        first.maybe_dispatch(step)
    assert first.drain(60)
    second = job.dispatcher(**reuse)
    began = job.clock.now_s
    for step in (1, 2):
        assert second.maybe_dispatch(step).action == "requested"
    assert second.drain(60)
    assert job.clock.now_s - began < 10
    assert sorted(polled(second.poll())) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("hashes", [True, False])
def test_the_digest_of_a_manifest_is_the_daemons(tmp_path: Path, hashes: bool) -> None:
    def build_all(folder: Path) -> None:
        (folder / "adapter").mkdir()
        for name in ("model.safetensors", "config.json", "adapter/a.safetensors", "optimizer.pt"):
            (folder / name).write_text(name)

    folder = publish(build_all, tmp_path, 3, hashes=hashes)
    expected = content_digest(folder, ".complete") if hashes else None
    assert published_digest(folder / ".complete") == expected
    assert published_digest(folder / "nothing") is None
    for odd in ("", "[]", '{"files": 3}', '{"files": {"a": {"size": "1", "xxh3": "x"}}}'):
        (folder / ".complete").write_text(odd)
        assert published_digest(folder / ".complete") is None


# --- whose points they are ----------------------------------------------------------------------


def test_another_run_does_not_wait_for_what_the_first_left_in_the_root(job: Job) -> None:
    job.exporter.run = None
    job.daemon.beat()
    for step in (1, 2, 3):  # unnamed, as any trainer writes them; kept by the daemon
        publish(build, job.root, step)
    second = job.dispatcher(run="second", num_steps=3)
    job.exporter.run = "second"
    results = [second.maybe_dispatch(step, f"v{step}").action for step in (1, 2, 3)]
    assert results == ["published", "published", "published"]
    assert second.finish(3).action == "known"
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(60)
    assert [(p.run, p.step) for p in job.daemon.points() if p.run == "second"] == [
        ("second", 1), ("second", 2), ("second", 3),
    ]  # fmt: skip


def test_unnamed_leftovers_are_the_daemons_run(job: Job) -> None:
    job.daemon.beat()
    publish(build, job.root, 1)
    same = job.dispatcher(max_in_flight=1)
    assert same.maybe_dispatch(2, Untouchable()).reason == "busy"


def test_a_job_without_a_run_names_the_daemons_in_all_that_it_gives(job: Job) -> None:
    job.clock.on_sleep = job.daemon.beat
    job.daemon.beat()
    job.exporter.run = None
    dispatcher = job.dispatcher(run=None, max_in_flight=1)
    dispatcher.baseline()
    assert job.words()["baseline.request"]["run"] == "r"
    job.daemon.turn()
    dispatcher.maybe_dispatch(1, "w1")
    assert job.manifest(1)["run"] == "r"
    dispatcher.maybe_dispatch(2, Untouchable())
    assert job.words()["step_2.skip"]["run"] == "r"
    dispatcher.finish(3, "w3")
    assert job.manifest(3)["run"] == "r"
    assert job.words()["run.end"]["run"] == "r"
    # a daemon of another experiment on the same root does not take them for its own
    job.daemon = FakeDaemon(job.root, job.results, run="next")
    job.daemon.turn()
    assert {point.run for point in job.daemon.points()} == {"r"}


def test_a_status_that_nobody_writes_any_more_names_no_run(job: Job) -> None:
    job.daemon.beat()  # of an experiment that ended long ago
    job.exporter.run = None
    dispatcher = job.dispatcher(run=None, results=None)
    began = job.clock.now_s
    dispatcher.maybe_dispatch(1, "w1")
    dispatcher.maybe_dispatch(2, "w2")
    assert job.clock.now_s - began < 4  # it is looked out for once
    assert "run" not in job.manifest(1)
    job.daemon = FakeDaemon(job.root, job.results.parent / "new", run="next")
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)
    assert {point.run for point in job.daemon.points()} == {"next"}
    assert polled(dispatcher.poll()) == [(1, 0), (2, 0)]


# --- the end ------------------------------------------------------------------------------------


def test_finish_without_weights_leaves_the_reason_of_a_failed_export(job: Job) -> None:
    job.daemon.beat()
    dispatcher = job.dispatcher(num_steps=2)
    job.exporter.faults.append(ExportError("the disk fell over"))
    failed = dispatcher.maybe_dispatch(2, "w2")
    assert dispatcher.finish(2) == failed
    assert job.words()["step_2.skip"]["reason"] == SkipReason.EXPORT_FAILED
    job.clock.on_sleep = job.daemon.turn
    began = job.clock.now_s
    assert dispatcher.drain(300)
    assert job.clock.now_s - began < 5
    assert job.ends() == [(2, 0, "export_failed")]
    # and it may still be given, when there are weights
    assert dispatcher.finish(2, "w2").action == "published"


def test_drain_says_that_words_could_not_be_written(job: Job) -> None:
    job.daemon.beat()
    dispatcher = job.dispatcher(baseline=False)
    job.clock.on_sleep = job.daemon.beat
    (job.root / "run.end").mkdir()  # nothing can take its name
    dispatcher.finish(0)
    drained = dispatcher.drain(5)
    assert drained.detail.startswith("words could not be written: ")
    assert "run.end" in drained.detail
    (job.root / "run.end").rmdir()
    assert dispatcher.drain(5)


def test_a_new_ledger_with_as_many_records_already_hides_none(job: Job) -> None:
    dispatcher = job.dispatcher(max_in_flight=9)
    for step in (1, 2):
        dispatcher.maybe_dispatch(step, f"w{step}")
        job.daemon.turn()
    assert polled(dispatcher.poll()) == [(1, 0), (2, 0)]
    job.daemon.ledger.rename(job.results / "old")
    job.daemon = FakeDaemon(job.root, job.results)
    for step in (3, 4, 5):
        dispatcher.maybe_dispatch(step, f"w{step}")
    for _ in range(4):
        job.daemon.turn()
    assert polled(dispatcher.poll()) == [(3, 0), (4, 0), (5, 0)]
    # and what is trained again is a new point of the new ledger
    dispatcher.maybe_dispatch(2, "w2")
    job.daemon.turn()
    assert polled(dispatcher.poll()) == [(2, 0)]


# --- a slow daemon ------------------------------------------------------------------------------


class SlowLink:
    """Each look costs ``seconds``."""

    restarts = 0
    where = "somewhere"

    def __init__(self, job: Job, seconds: float) -> None:
        self._job = job
        self._seconds = seconds
        self.asked = 0

    def status(self) -> None:
        self.asked += 1
        self._job.clock.now_s += self._seconds

    def records(self, after: int) -> list[dict[str, Any]]:
        assert after == 0
        return []

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("seconds", "share"), [(0.05, 1.0), (0.5, 0.06), (3.0, 0.06), (9.0, 0.08)])
def test_a_slow_daemon_costs_training_a_twentieth_at_most(
    job: Job, seconds: float, share: float
) -> None:
    link = SlowLink(job, seconds)
    dispatcher = job.dispatcher(link=link, results=None, interval=10**6)
    began = job.clock.now_s
    for _ in range(2000):
        dispatcher.poll()
        job.clock.now_s += 0.5  # training
    assert link.asked * seconds <= share * (job.clock.now_s - began)
    assert link.asked == 2000 or seconds > 0.1
    # who waits has nothing better to do
    dispatcher.maybe_dispatch(10**6, "w")
    before = link.asked
    assert not dispatcher.drain(30)
    assert link.asked > before


def test_the_log_says_where_a_daemon_was_looked_for(job: Job) -> None:
    with structlog.testing.capture_logs() as logs:
        job.dispatcher().poll()
    (away,) = [entry for entry in logs if entry["event"] == "daemon_away"]
    assert f"no status at {job.root / '.evald/status.json'} or " in away["detail"]


def test_names_that_the_daemon_will_never_take_are_told_of(job: Job) -> None:
    job.daemon.beat()
    with structlog.testing.capture_logs() as logs:
        dispatcher = job.dispatcher(pattern="snap_{step}")
        dispatcher.poll()
        dispatcher.poll()
    (told,) = [entry for entry in logs if entry["event"] == "names_differ"]
    assert 'evald takes "step_{step}"' in told["detail"]
    assert json.dumps("snap_{step}") in told["detail"]
    with structlog.testing.capture_logs() as logs:
        job.dispatcher().poll()
    assert "names_differ" not in {entry["event"] for entry in logs}
