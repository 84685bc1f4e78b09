"""Exports in the background, dry runs, and arguments that are refused."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from dispatch_rig import Job, Untouchable

from evald.trainer.contract import NoSpace
from evald.trainer.dispatcher import EvalDispatcher


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# --- exports in the background ------------------------------------------------------------------


def background(job: Job, **settings: Any) -> EvalDispatcher:
    job.exporter.background = True
    return job.dispatcher(mode="async", **settings)


def test_a_failure_in_the_background_is_a_skip_at_its_own_step(job: Job) -> None:
    dispatcher = background(job, interval=2)
    assert dispatcher.maybe_dispatch(2, "w2").action == "published"
    job.exporter.faults.append(NoSpace("cannot write shard 1: the file system is full"))
    job.exporter.finish()
    assert dispatcher.maybe_dispatch(3).action == "not_due"  # noticed at the next call of any kind
    assert job.words()["step_2.skip"] == {
        "run": "r",
        "reason": "no_space",
        "detail": "cannot write shard 1: the file system is full",
    }


def test_skip_does_not_wait_for_the_export_before_and_backpressure_does(job: Job) -> None:
    dispatcher = background(job)
    dispatcher.maybe_dispatch(1, "w1")
    skipped = dispatcher.maybe_dispatch(2, Untouchable())
    assert (skipped.reason, skipped.detail) == (
        "busy",
        "the snapshot of step 1 is still being written",
    )
    job.exporter.finish()
    waiting = background(job, overflow="backpressure")
    waiting.maybe_dispatch(3, "w3")
    job.clock.on_sleep = job.exporter.finish
    assert waiting.maybe_dispatch(4, "w4").action == "skipped"  # 1 and 3 are in flight by now
    assert job.snapshots() == {1: "w1", 3: "w3"}


def test_resume_returns_when_the_snapshot_is_there(job: Job) -> None:
    dispatcher = background(job)
    finishing = threading.Timer(0.05, job.exporter.finish)
    finishing.start()
    assert dispatcher.resume(4, "w4").action == "published"
    assert job.snapshots() == {4: "w4"}
    finishing.join()


def test_a_long_export_of_a_known_step_is_not_taken_for_answered(job: Job) -> None:
    first = background(job)
    first.maybe_dispatch(1, "w1")
    job.exporter.finish()
    job.daemon.turn()
    second = background(job)
    second.maybe_dispatch(1, "trained again")
    job.clock.on_sleep = job.daemon.beat
    assert second.drain(200).missing == ("step 1",)
    job.exporter.finish()
    assert second.drain(5).missing == ("step 1",)
    job.clock.on_sleep = job.daemon.turn
    assert second.drain(5)
    assert job.ends() == [(1, 0, "ok"), (1, 1, "ok")]


def test_drain_and_the_runs_end_come_after_the_export(job: Job) -> None:
    dispatcher = background(job)
    dispatcher.finish(1, "w1")
    assert job.words() == {}
    unfinished = dispatcher.drain(3)
    assert (unfinished.missing, bool(unfinished)) == (("step 1",), False)

    def turn() -> None:
        if job.exporter.pending:
            job.exporter.finish()
        job.daemon.turn()

    job.clock.on_sleep = turn
    assert dispatcher.drain(60)
    job.daemon.turn()
    assert job.ends() == [(1, 0, "ok")]
    assert job.daemon.records()[-1].step == 1
    assert job.words() == {}


# --- the rest -----------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_due_and_touches_nothing(tmp_path: Path) -> None:
    root = tmp_path / "never"
    with EvalDispatcher(
        root, first_step=0, interval=2, base_dir="a/hub-id", dry_run=True, num_steps=3
    ) as dispatcher:
        said = [dispatcher.baseline(), dispatcher.resume(1, Untouchable())]
        said += [dispatcher.maybe_dispatch(step, Untouchable()) for step in (0, 1, 1, 2)]
        said.append(dispatcher.finish(2))
        assert dispatcher.poll() == []
        assert dispatcher.drain(1)
        assert (
            dispatcher.shared_eval(1, "v", pause=pytest.fail, resume=pytest.fail, timeout_s=1)
            is None
        )
    assert [one.action for one in said] == [
        "dry_run", "dry_run", "not_due", "dry_run", "known", "dry_run", "dry_run",
    ]  # fmt: skip
    assert not root.exists()


def test_shared_engines_are_asked_about_while_the_producer_is_still(job: Job) -> None:
    calls: list[str] = []
    dispatcher = job.dispatcher()
    silent = dispatcher.shared_eval(
        3,
        "v3",
        pause=lambda: calls.append("pause"),
        resume=lambda: calls.append(f"resume, {len(job.words())} requests left"),
        timeout_s=0.3,
    )
    assert silent is None
    assert calls == ["pause", "resume, 0 requests left"]


def test_only_what_was_opened_here_is_closed(job: Job) -> None:
    with job.dispatcher():
        pass
    assert not job.exporter.closed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overflow": "latest"}, "overflow='latest': give 'skip' or 'backpressure'"),
        ({"mode": "later"}, "mode='later': give 'sync' or 'async' or 'reuse'"),
        ({"pattern": "step"}, "pattern='step' lacks \"{step}\""),
        ({"run": "a/b"}, "run='a/b': it becomes a part of file and metric names"),
        ({"max_in_flight": 0}, "max_in_flight=0: give a whole number, 1 or more"),
        (
            {"backpressure_timeout_s": 0},
            "_timeout_s=0: give a number of seconds above 0",
        ),
        ({"dead_after_s": float("inf")}, "dead_after_s=inf"),
        ({"baseline_step": 1}, "baseline_step=1: with first_step=1 that is a training step's"),
        ({"first_step": 0, "baseline_step": 0}, "use -1, or baseline=False"),
        ({"save_interval": 5}, "when snapshots are exported: use mode='reuse'"),
        ({"checkpoint_path": "/x/{step}"}, "when snapshots are exported: use mode='reuse'"),
        ({"mode": "reuse"}, "checkpoint_path=None: give where the trainer saves them"),
        ({"mode": "reuse", "checkpoint_path": "/x"}, "checkpoint_path='/x': give where"),
        ({"mode": "reuse", "checkpoint_path": "/{step}"}, "without save_interval: give"),
        (
            {"mode": "reuse", "checkpoint_path": "/{step}", "save_interval": 2, "interval": 3},
            "interval=3: it is no multiple of save_interval=2",
        ),
        ({"url": "http://h:1"}, "by results and url at once: give one"),
        ({"token": "x"}, "a token without url"),
        ({"token_file": "x"}, "a token without url"),
        ({"destination": "h:/d"}, "give url, the daemon's HTTP API, and its token"),
        ({"carrier": "c"}, "give url, the daemon's HTTP API, and its token"),
        ({"destination": "h:/d", "carrier": "c"}, "destination and carrier at once"),
        ({"base_dir": None, "exporter": None}, "without base_dir: give the base model's"),
        ({"interval": 0}, "interval=0"),
        ({"base_dir": "/no/such"}, "base_dir='/no/such': there is no such directory on this host"),
    ],
)
def test_refused(job: Job, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        job.dispatcher(**settings)


@pytest.mark.parametrize("root", ["http://evalnode:8008", "evalnode:/dev/shm/evald"])
def test_a_root_on_another_host_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="as the root: it is not on this host"):
        EvalDispatcher(root, first_step=1, interval=1, mode="reuse")


def test_wrong_calls_are_refused(job: Job) -> None:
    dispatcher = job.dispatcher()
    with pytest.raises(ValueError, match="step 0: with first_step=1 no step has that number"):
        dispatcher.maybe_dispatch(0, "w")
    with pytest.raises(ValueError, match="publish step 3 without weights: pass the model"):
        dispatcher.maybe_dispatch(3)
    with pytest.raises(ValueError, match="publish step 3 without weights"):
        dispatcher.resume(3)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("/checkpoints/3", "cannot export a str: give a model, a state dict"),
        ([1.0, 2.0], "a list of tensors without names: give the model itself"),
        (3, "cannot export a int"),
    ],
)
def test_weights_that_are_none_are_refused(job: Job, weights: Any, words: str) -> None:
    with job.dispatcher(exporter=None) as dispatcher:
        for call in (dispatcher.maybe_dispatch, dispatcher.resume, dispatcher.finish):
            with pytest.raises(ValueError, match=re.escape(words)):
                call(3, weights)
    assert job.words() == {}
