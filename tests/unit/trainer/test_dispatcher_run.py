"""The beginning and the end of a run: its baseline, its last step; and reused checkpoints."""

from __future__ import annotations

import operator
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from dispatch_rig import Job, Untouchable

from evald.point import Outcome
from evald.results.records import RunEnd
from evald.testing import Ending


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# --- the baseline -------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_step", "expected"), [(0, -1), (1, 0)])
def test_baseline_is_one_before_the_first_step(job: Job, first_step: int, expected: int) -> None:
    dispatcher = job.dispatcher(first_step=first_step)
    assert dispatcher.baseline().action == "requested"
    assert job.words() == {
        "baseline.request": {
            "run": "r",
            "kind": "baseline",
            "step": expected,
            "path": str(job.base),
        }
    }
    dispatcher.maybe_dispatch(first_step, "w")
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)
    assert [(p.kind, p.step) for p in job.daemon.points()] == [
        ("baseline", expected),
        ("step", first_step),
    ]


@pytest.mark.parametrize("state", ["requested", "accepted", "ended"])
def test_baseline_once_for_each_run(job: Job, state: str) -> None:
    first = job.dispatcher()
    first.baseline()
    assert first.baseline().action == "known"
    if state != "requested":
        job.daemon.scan()
    if state == "ended":
        job.daemon.end()
    job.daemon.beat()
    again = job.dispatcher()  # the job was restarted
    assert again.baseline().action == ("requested" if state == "requested" else "known")
    job.clock.on_sleep = job.daemon.turn
    assert again.drain(60)
    assert job.ends() == [(0, 0, "ok")]
    # another run has its own
    assert job.dispatcher(run="r2").baseline().action == "requested"


def test_baseline_is_the_daemons_own_model_where_the_base_has_no_weights(job: Job) -> None:
    (job.base / "model.safetensors").unlink()
    job.dispatcher().baseline()
    assert "path" not in job.words()["baseline.request"]


def test_baseline_model_can_be_named(job: Job, tmp_path: Path) -> None:
    job.dispatcher(baseline_path=tmp_path / "other").baseline()
    assert job.words()["baseline.request"]["path"] == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "completed", "expected"),
    [
        ({"baseline": False}, None, "not_due"),
        ({"num_steps": 5}, 5, "not_due"),  # nothing is left to train
        ({"num_steps": 5}, 4, "requested"),
        ({"num_steps": 0}, None, "requested"),
        ({"num_steps": 0}, 0, "requested"),
    ],
)
def test_no_baseline_when_there_is_nothing_to_compare(
    job: Job, settings: dict[str, Any], completed: int | None, expected: str
) -> None:
    assert job.dispatcher(**settings).baseline(completed_step=completed).action == expected


def test_a_run_of_no_steps_is_baseline_drain_done(job: Job) -> None:
    with job.dispatcher(num_steps=0) as dispatcher:
        dispatcher.baseline()
        assert dispatcher.finish(0).action == "not_due"
        job.clock.on_sleep = job.daemon.turn
        assert dispatcher.drain(60)
        job.daemon.turn()
    assert job.ends() == [(0, 0, "ok")]
    end = job.daemon.records()[-1]
    assert isinstance(end, RunEnd)
    assert (end.step, end.points["ok"]) == (0, 1)


# --- the end ------------------------------------------------------------------------------------


def test_early_stop_off_cadence_publishes_the_last_step(job: Job) -> None:
    dispatcher = job.dispatcher(interval=10, num_steps=100)
    dispatcher.maybe_dispatch(17, Untouchable())
    assert dispatcher.finish(17, "w17").action == "published"
    assert job.snapshots() == {17: "w17"}
    assert job.manifest(17)["final"]
    assert job.words()["run.end"] == {"run": "r", "last_step": 17}


def test_finish_does_not_export_again(job: Job) -> None:
    dispatcher = job.dispatcher(interval=10)
    dispatcher.maybe_dispatch(20, "w20")
    assert dispatcher.finish(20, Untouchable()).action == "known"
    assert job.exporter.steps == [20]
    assert job.words()["run.end"]["last_step"] == 20


def test_finish_without_weights_says_what_is_missing(job: Job) -> None:
    dispatcher = job.dispatcher(interval=10)
    skipped = dispatcher.finish(17)
    assert skipped.reason == "ckpt_missing"
    assert job.words()["step_17.skip"]["detail"] == (
        "the run ended at step 17, and finish() was not given its weights"
    )
    assert "run.end" in job.words()


def test_the_last_step_is_none_before_the_newest(job: Job) -> None:
    dispatcher = job.dispatcher(interval=5)
    dispatcher.maybe_dispatch(5, "w5")
    dispatcher.maybe_dispatch(7, Untouchable())
    with pytest.raises(ValueError, match="cannot end the run at step 3: step 7 came already"):
        dispatcher.finish(3, "w3")
    assert "run.end" not in job.words()


def test_a_reason_is_said_once_until_a_step_is_taken(job: Job) -> None:
    job.daemon.beat()
    dispatcher = job.dispatcher(max_in_flight=1)
    with structlog.testing.capture_logs() as logs:
        for step in range(1, 5):
            dispatcher.maybe_dispatch(step, f"w{step}")
        job.daemon.turn()
        job.daemon.turn()
        for step in range(5, 8):
            dispatcher.maybe_dispatch(step, f"w{step}")
    said = [(one["step"], one["log_level"]) for one in logs if one["event"] == "point_skipped"]
    levels = ["info", "debug", "debug", "info", "debug"]
    assert said == list(zip([2, 3, 4, 6, 7], levels, strict=True))


def test_a_daemon_that_never_was_is_waited_for_once(job: Job) -> None:
    dispatcher = job.dispatcher(max_in_flight=1)
    dispatcher.maybe_dispatch(1, "w1")
    began_s = job.clock.now_s
    assert dispatcher.finish(2, "w2").action == "published"
    assert not dispatcher.drain(1000)
    assert job.clock.now_s - began_s == pytest.approx(10, abs=1.5)


@pytest.mark.parametrize("overflow", ["skip", "backpressure"])
def test_the_last_step_is_never_skipped_busy(job: Job, overflow: str) -> None:
    dispatcher = job.dispatcher(max_in_flight=1, overflow=overflow, num_steps=2)
    dispatcher.maybe_dispatch(1, "w1")
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.maybe_dispatch(2, "w2").action == "published"
    assert job.ends() == [(1, 0, "ok")]  # it waited for the oldest


@pytest.mark.parametrize("alive", [True, False])
def test_the_last_step_is_published_in_any_case_after_its_wait(job: Job, alive: bool) -> None:
    dispatcher = job.dispatcher(max_in_flight=1, backpressure_timeout_s=50, interval=5)
    dispatcher.maybe_dispatch(5, "w5")
    began = job.clock.now_s
    if alive:
        job.clock.on_sleep = job.daemon.beat
    assert dispatcher.finish(7, "w7").action == "published"
    assert job.clock.now_s - began == pytest.approx(50 if alive else 10, abs=1.5)
    assert job.manifest(7)["final"]


def test_an_early_stop_at_a_step_that_was_skipped_busy_publishes_it(job: Job) -> None:
    dispatcher = job.dispatcher(max_in_flight=1, interval=1)
    dispatcher.maybe_dispatch(1, "w1")
    job.daemon.scan()
    job.daemon.beat()
    assert dispatcher.maybe_dispatch(2, "w2").reason == "busy"
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.finish(2, "w2").action == "published"
    assert dispatcher.drain(60)
    assert job.ends() == [(2, 0, "busy"), (1, 0, "ok"), (2, 1, "ok")]


def test_a_final_point_that_failed_at_the_daemon_is_not_published_again(job: Job) -> None:
    job.daemon.script(3, Ending(outcome=Outcome.SKIPPED, reason="pin_violation"))
    dispatcher = job.dispatcher()
    dispatcher.maybe_dispatch(3, "w3")
    job.daemon.turn()
    assert dispatcher.finish(3, Untouchable()).action == "known"


# --- reuse --------------------------------------------------------------------------------------


def reusing(job: Job, tmp_path: Path, **settings: Any) -> Any:
    return job.dispatcher(
        mode="reuse",
        exporter=None,
        save_interval=5,
        checkpoint_path=str(tmp_path / "saves" / "iter_{step}"),
        **({"interval": 10} | settings),
    )


def test_reuse_asks_for_what_the_trainer_has_saved(job: Job, tmp_path: Path) -> None:
    saved = tmp_path / "saves" / "iter_10"
    saved.mkdir(parents=True)
    with reusing(job, tmp_path) as dispatcher:
        assert dispatcher.maybe_dispatch(5).action == "not_due"
        assert dispatcher.maybe_dispatch(10).action == "requested"
        assert job.words() == {
            "reuse_10.request": {"run": "r", "kind": "reuse", "step": 10, "path": str(saved)}
        }
        missing = dispatcher.maybe_dispatch(20)
        assert missing.reason == "ckpt_missing"
        assert "iter_20: there is no such directory" in missing.detail
        # the last step has no save of its own: said, not guessed
        assert dispatcher.finish(23).reason == "ckpt_missing"
        job.clock.on_sleep = job.daemon.turn
        assert dispatcher.drain(60)
    assert sorted(job.ends()) == [(10, 0, "ok"), (20, 0, "ckpt_missing"), (23, 0, "ckpt_missing")]
    assert saved.is_dir()


def test_reuse_can_finish_on_another_directory(job: Job, tmp_path: Path) -> None:
    final = tmp_path / "saves" / "final"
    final.mkdir(parents=True)
    dispatcher = reusing(job, tmp_path)
    assert dispatcher.finish(23, path=final).action == "requested"
    assert job.words()["reuse_23.request"]["path"] == str(final)


# --- what a job may hand over -------------------------------------------------------------------


@pytest.mark.parametrize("step", [True, 2.0, "2", None, 10**15])
def test_a_step_that_is_none_is_a_wrong_argument(job: Job, step: Any) -> None:
    dispatcher = job.dispatcher()
    for call in (dispatcher.maybe_dispatch, dispatcher.resume, dispatcher.finish):
        with pytest.raises(ValueError, match="cannot use"):
            call(step, "w")
    with pytest.raises(ValueError, match="cannot wait for"):
        dispatcher.drain(float("nan"))


def test_numpys_steps_are_steps(job: Job, tmp_path: Path) -> None:
    (tmp_path / "c2").mkdir()
    dispatcher = job.dispatcher(
        mode="reuse", exporter=None, save_interval=1, checkpoint_path=f"{tmp_path}/c{{step}}"
    )
    step: Any = np.int64(2)
    assert dispatcher.maybe_dispatch(step).action == "requested"
    assert job.words()["reuse_2.request"]["step"] == 2


def test_a_snapshot_that_was_wiped_frees_its_slot(job: Job) -> None:
    dispatcher = job.dispatcher()
    dispatcher.maybe_dispatch(1, "w1")
    shutil.rmtree(job.root / "step_1")
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(900)
    assert job.ends() == [(1, 0, "ckpt_missing")]


def test_a_callback_that_raises_loses_no_other_record(job: Job) -> None:
    dispatcher = job.dispatcher(after_seq=0)
    dispatcher.maybe_dispatch(1, "w1")
    dispatcher.maybe_dispatch(2, "w2")
    job.clock.on_sleep = job.daemon.turn
    assert dispatcher.drain(60)
    with pytest.raises(ZeroDivisionError):
        dispatcher.poll(lambda _: operator.floordiv(1, 0))
    assert 2 in {record["step"] for record in dispatcher.poll()}
