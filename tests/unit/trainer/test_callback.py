"""EvaldCallback in real, short trainings, against a fake daemon."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_training import NotingExporter, Reporter, trainer

from evald.demo.model import new_model
from evald.point import Outcome
from evald.testing.fake_daemon import Ending, FakeDaemon
from evald.trainer.callback import EvaldCallback
from evald.trainer.dispatcher.outcomes import Export


class Node:
    """A fake daemon, and what publishes into its root."""

    def __init__(self, work: Path) -> None:
        self.root = work / "root"
        self.daemon = FakeDaemon(self.root, work / "results", base_dir=work)
        self.exporter = NotingExporter(self.root)
        for step in range(20):
            self.daemon.script(step, *[Ending(metrics={"eval/a": step / 100})] * 3)

    def callback(self, job: Any, **settings: Any) -> EvaldCallback:
        made = EvaldCallback(
            job,
            self.root,
            **{
                "exporter": self.exporter,
                "overflow": "backpressure",
                "backpressure_timeout_s": 20.0,
                "drain_timeout_s": 20.0,
                **({} if {"steps", "epochs", "reuse"} & set(settings) else {"interval": 2}),
                **settings,
            },
        )
        job.add_callback(made)
        return made

    def wait_for(self, *points: tuple[str, int, int, str]) -> None:
        """Poll until these points, and no others, have ended."""
        deadline = time.monotonic() + 20
        while self.ended() != list(points) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.ended() == list(points)

    def ended(self) -> list[tuple[str, int, int, str]]:
        return sorted(
            (point.kind, point.step, point.revision, point.outcome)
            for point in self.daemon.points()
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    node.daemon.beat()
    node.daemon.start()
    yield node
    node.daemon.stop()


def steps(*numbers: int) -> list[tuple[str, int, int, str]]:
    return [("baseline", 0, 0, "ok"), *(("step", step, 0, "ok") for step in numbers)]


def logged(job: Any) -> dict[int, float]:
    return {entry["step"]: entry["eval/a"] for entry in job.state.log_history if "eval/a" in entry}


def test_baseline_due_steps_and_the_forced_last_come_back_at_their_steps(
    node: Node, tmp_path: Path
) -> None:
    reporter = Reporter()
    job = trainer(tmp_path / "out", callbacks=[reporter])
    node.callback(job)
    job.train()
    assert node.ended() == steps(2, 4, 5)
    assert node.exporter.exported == {step: reporter.weights[step] for step in (2, 4, 5)}
    assert node.exporter.final == [5]
    assert logged(job) == {0: 0.0, 2: 0.02, 4: 0.04, 5: 0.05}
    by_step = {step: (epoch, logs) for step, epoch, logs in reporter.told if "eval_a" in logs}
    assert {step: logs["eval_a"] for step, (_, logs) in by_step.items()} == logged(job)
    assert [by_step[step][0] for step in (0, 2, 4, 5)] == [0.0, 0.25, 0.5, 0.625]
    assert by_step[4][1] == {"eval_a": 0.04, "eval_step": 4.0, "epoch": 0.5}
    # the Trainer's own log is as it would be without
    assert reporter.steps_with("loss") == [2, 4]
    assert "train_runtime" in job.state.log_history[-1]


def test_a_run_of_no_steps_has_its_baseline(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out")
    callback = node.callback(job)
    # (the Trainer takes max_steps=0 for "all of them"; one that has nothing to do says this)
    state, control = job.state, job.control
    state.global_step = state.max_steps = 0
    callback.on_train_begin(job.args, state, control)
    callback.on_log(job.args, state, control, logs={"train_runtime": 0.0})
    callback.on_train_end(job.args, state, control)
    assert node.ended() == steps()
    assert not node.exporter.exported
    assert logged(job) == {0: 0.0}


def test_results_are_logged_while_the_training_goes_on(node: Node, tmp_path: Path) -> None:
    class Patient(Reporter):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            if state.global_step == 3:
                node.daemon.start()
                node.wait_for(*steps(2))

    node.daemon.stop()  # until then
    reporter = Patient()
    job = trainer(tmp_path / "out", callbacks=[reporter])
    node.callback(job, poll_s=0.0)
    job.train()
    # in the very step in which the Trainer logs, too: neither loses its own
    told = [(step, "loss" in logs) for step, _, logs in reporter.told if "train_loss" not in logs]
    assert told.index((2, False)) < told.index((4, True))
    assert reporter.steps_with("loss") == [2, 4]


def test_a_run_that_begins_again_logs_only_what_it_measures_itself(
    node: Node, tmp_path: Path
) -> None:
    """The baseline is the run's; the steps of an earlier life were of other weights."""
    for step, values in {2: (0.2, 0.7), 3: (0.3, 0.8)}.items():
        node.daemon.endings[step] = deque(Ending(metrics={"eval/a": value}) for value in values)
    for seed, expected in ((0, {0: 0.0, 2: 0.2, 3: 0.3}), (1, {0: 0.0, 2: 0.7, 3: 0.8})):
        job = trainer(tmp_path / "out", max_steps=3, model=new_model(seed))
        node.callback(job)
        job.train()
        assert logged(job) == expected
        assert len([entry for entry in job.state.log_history if "eval/a" in entry]) == 3


class Stop(Reporter):
    """Stops the training when the Trainer has evaluated this step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        control.should_training_stop = state.global_step == self.at


@pytest.mark.parametrize("every", ["steps", "epoch"])
@pytest.mark.parametrize("speaks", [True, False], ids=["", "a log that shows callbacks nothing"])
def test_the_last_weights_are_not_the_best_ones_that_the_trainer_loads_at_its_end(
    node: Node, tmp_path: Path, every: str, speaks: bool
) -> None:
    """An early stop, after which load_best_model_at_end changes the weights."""
    last = 3 if every == "steps" else 16
    reporter = Stop(last)
    job = trainer(
        tmp_path / "out",
        max_steps=25,
        eval_strategy=every,
        eval_steps=1,
        save_strategy=every,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the best is the first: it only gets better from there
        learning_rate=1e-2,
    )
    node.callback(job, interval=10)
    job.add_callback(reporter)  # it stops the training behind evald's back
    if not speaks:
        job.log = lambda *_: None
    job.train()
    assert job.state.global_step == last
    assert job.state.best_global_step == (1 if every == "steps" else 8)
    due = [step for step in (10,) if step < last]
    assert node.ended() == steps(*due, last)
    assert node.exporter.exported == {step: reporter.weights[step] for step in (*due, last)}
    assert node.exporter.final == [last]
    assert sorted(logged(job)) == [0, *due, last]


def test_a_stop_at_the_end_of_an_epoch_that_is_not_saved(node: Node, tmp_path: Path) -> None:
    reporter = Stop(16)
    job = trainer(
        tmp_path / "out",
        callbacks=[reporter],
        max_steps=25,
        eval_strategy="epoch",
        save_strategy="best",  # which the last epoch is not
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        learning_rate=1e-2,
    )
    node.callback(job, steps=())
    job.log = lambda *_: None
    job.train()
    assert job.state.best_global_step == 8
    assert node.exporter.exported == {16: reporter.weights[16]}


@pytest.mark.parametrize("seen", [False, True], ids=["ended while it was down", "logged before"])
def test_a_resumed_job_goes_on_without_a_gap_or_a_second_baseline(
    node: Node, tmp_path: Path, seen: bool
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3}

    class Die(Reporter):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            if seen and state.global_step == 2:
                node.wait_for(*steps(2))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state, control
            raise KeyboardInterrupt

    first = Die()
    job = trainer(tmp_path / "out", callbacks=[first], **settings)
    node.callback(job, poll_s=0.0 if seen else 1e9)
    with pytest.raises(KeyboardInterrupt):
        job.train()
    assert first.steps_with("eval_a") == ([0, 2] if seen else [])
    node.wait_for(*steps(2))
    second = Reporter()
    job = trainer(tmp_path / "out", callbacks=[second], model=new_model(1), **settings)
    node.callback(job)
    job.train(resume_from_checkpoint=True)
    assert job.state.global_step == 5
    assert node.ended() == steps(2, 3, 4, 5)
    assert node.exporter.exported[3] == first.weights[3]  # its own bytes
    assert logged(job) == {0: 0.0, 2: 0.02, 3: 0.03, 4: 0.04, 5: 0.05}
    assert second.steps_with("eval_a") == ([3, 4, 5] if seen else [0, 2, 3, 4, 5])


def test_evaluate_and_predict_dispatch_nothing(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out")
    node.callback(job)
    job.evaluate()
    job.predict(job.eval_dataset)
    assert not node.exporter.exported
    assert not [path for path in node.root.iterdir() if path.name != ".evald"]
    assert not node.daemon.records()


def test_ends_of_epochs_with_gradient_accumulation(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out", max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2)
    node.callback(job, epochs=True, baseline=False)
    job.train()
    assert job.state.global_step == 12
    assert node.ended() == steps(4, 8, 12)[1:]
    epochs = [entry["epoch"] for entry in job.state.log_history if "eval/a" in entry]
    assert epochs == [1.0, 2.0, 3.0]


def test_reuses_the_checkpoints_that_the_trainer_saves(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out", save_strategy="steps", save_steps=2)
    node.callback(job, reuse=True, exporter=None)
    job.train()
    assert node.ended() == steps(2, 4, 5)
    for point in node.daemon.points()[1:]:
        assert point.directory == str(tmp_path / "out" / f"checkpoint-{point.step}")
        assert Path(point.directory, "model.safetensors").exists()
    assert sorted(logged(job)) == [0, 2, 4, 5]


def test_reuses_the_checkpoints_of_epochs(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out", max_steps=-1, num_train_epochs=2, save_strategy="epoch")
    node.callback(job, reuse=True, epochs=True, exporter=None)
    job.train()
    assert node.ended() == steps(8, 16)


def test_a_second_training_is_a_run_that_begins_again(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out", max_steps=2)
    node.callback(job)
    job.train()
    job.train()
    assert node.ended() == [*steps(2), ("step", 2, 1, "ok")]
    assert logged(job) == {0: 0.0, 2: 0.02}


@pytest.mark.parametrize("fault", ["exporter", "reporter", "daemon"])
def test_nothing_of_it_ends_the_training(node: Node, tmp_path: Path, fault: str) -> None:
    class Broken(Reporter):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any
        ) -> None:
            super().on_log(args, state, control, logs=logs)
            if "eval_a" in logs:
                raise RuntimeError("no connection")

    reporter = Broken() if fault == "reporter" else Reporter()
    after = Reporter()
    job = trainer(tmp_path / "out", callbacks=[reporter, after])
    if fault == "exporter":
        node.exporter.error = OSError("no such device")
    if fault == "daemon":
        node.daemon.stop()
    node.callback(job, dead_after_s=0.3)
    began = time.monotonic()
    assert job.train().global_step == 5
    assert time.monotonic() - began < 15
    if fault == "exporter":
        skipped = [point for point in node.daemon.points() if point.outcome is Outcome.SKIPPED]
        assert [(point.step, point.reason) for point in skipped] == [
            (step, "export_failed") for step in (2, 4, 5)
        ]
        assert after.steps_with("eval_skipped_export_failed") == [2, 4, 5]
    if fault == "reporter":
        assert sorted(after.steps_with("eval_a")) == [0, 2, 4, 5]
    if fault == "daemon":
        assert not after.steps_with("eval_a")


def test_an_on_log_of_the_users_can_stop_the_training_by_what_evald_measured(
    node: Node, tmp_path: Path
) -> None:
    class Enough(Reporter):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any
        ) -> None:
            super().on_log(args, state, control, logs=logs)
            if logs.get("eval_a", 0) >= 0.02:
                control.should_training_stop = True

    job = trainer(tmp_path / "out", callbacks=[Enough()], max_steps=100_000)
    node.callback(job, poll_s=0.0)
    job.train()
    assert job.state.global_step < 100_000
    assert ("step", 2, 0, "ok") in node.ended()


def test_a_hyperparameter_search_is_left_alone(node: Node, tmp_path: Path) -> None:
    job = trainer(tmp_path / "out")
    callback = node.callback(job)
    state = SimpleNamespace(is_hyper_param_search=True, global_step=2, max_steps=5)
    control = object()
    assert callback.on_train_begin(job.args, state, control) is control
    assert callback.on_step_end(job.args, state, control) is control
    assert callback.on_log(job.args, state, control, logs={"train_runtime": 1.0}) is control
    assert not node.exporter.exported


class Follower:
    """Rank 1 of 2: it hears that rank 0 exports."""

    rank = 1
    size = 2
    near = (0, 1)

    def exchange(self, value: Any) -> list[Any]:
        return [Export(), value]


def test_other_ranks_take_part_in_exports_and_do_nothing_else(node: Node, tmp_path: Path) -> None:
    node.daemon.stop()
    silent = NotingExporter(tmp_path / "elsewhere")
    job = trainer(tmp_path / "out")
    node.callback(job, exporter=silent, ranks=Follower())
    job.train()
    assert sorted(silent.exported) == [2, 4, 5]
    assert not [path for path in node.root.iterdir() if path.name != ".evald"]
    assert not logged(job)
