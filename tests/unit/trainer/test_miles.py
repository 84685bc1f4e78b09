"""miles' contract for a checkpoint evaluation, with a stand-in of miles and a fake daemon."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ledger_link import LedgerLink

from evald.point import Kind, Outcome, PointKey
from evald.testing.fake_daemon import Ending, FakeDaemon
from evald.trainer.links.file_link import FileLink
from evald.trainer.links.http_link import HttpLink
from evald.trainer.request import hand_over

STAND_IN = Path(__file__).parent / "miles_stand_in"


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """evald.trainer.miles, imported where there is a miles."""
    monkeypatch.syspath_prepend(STAND_IN)
    for name in [name for name in os.environ if name.startswith("EVALD_")]:
        monkeypatch.delenv(name)
    yield importlib.import_module("evald.trainer.miles")
    for name in [name for name in sys.modules if name.split(".")[0] == "miles"]:
        del sys.modules[name]
    del sys.modules["evald.trainer.miles"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path / "root", tmp_path / "results")
    daemon.beat()
    daemon.start()
    yield daemon
    daemon.stop()


def made(plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **args: Any) -> Any:
    """What miles makes of the class, by its path."""
    monkeypatch.setenv("EVALD_ROOT", str(tmp_path / "root"))
    types = sys.modules["miles.rollout.base_types"]
    arguments = Namespace(**{"hf_checkpoint": str(tmp_path / "base"), "reward_key": None, **args})
    return plug_in.EvaldCheckpointEval(types.RolloutFnConstructorInput(args=arguments))


def call(fn: Any, rollout_id: int, directory: Path | str) -> Any:
    """One evaluation as miles asks for it."""
    types = sys.modules["miles.rollout.base_types"]
    given = types.RolloutFnEvalInput(
        rollout_id=rollout_id, weight_version=str(rollout_id), hf_dir=str(directory)
    )
    return fn(given)


def checkpoint(tmp_path: Path, name: str, content: str = "w") -> Path:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "model.safetensors").write_text(content)
    return directory


def write_samples(tmp_path: Path, step: int, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path / "results" / "samples" / "r" / f"step_{step}.r0"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_a_checkpoint_is_measured_as_the_step_of_its_rollout(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemon: FakeDaemon
) -> None:
    contract = sys.modules["miles.rollout.checkpoint_eval"]
    assert issubclass(plug_in.EvaldCheckpointEval, contract.CheckpointEvalFn)
    daemon.script(4, Ending(metrics={"eval/a": 0.5, "eval/a/stderr": 0.1}))
    fn = made(plug_in, monkeypatch, tmp_path)
    directory = checkpoint(tmp_path, "step_4")
    output = await call(fn, 4, directory)
    fn.dispose()
    assert output.metrics == {"eval/a": 0.5, "eval/a/stderr": 0.1}
    assert output.data == {}  # no samples can be read: evald's own metrics are the curve
    point = daemon.points()[0]
    assert (point.kind, point.step, point.directory) == (Kind.STEP, 4, str(directory))


async def test_the_model_before_the_first_step_is_not_step_0(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemon: FakeDaemon
) -> None:
    base = checkpoint(tmp_path, "base")
    link = tmp_path / "link-to-base"
    link.symlink_to(base)
    fn = made(plug_in, monkeypatch, tmp_path)
    await call(fn, 0, link)
    await call(fn, 0, checkpoint(tmp_path, "step_0", "trained"))
    assert [(point.kind, point.step) for point in daemon.points()] == [
        (Kind.BASELINE, -1),
        (Kind.STEP, 0),
    ]


def test_a_hub_id_is_the_daemons_own_base_model(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fn = made(plug_in, monkeypatch, tmp_path, hf_checkpoint="Qwen/Qwen3-4B")
    ask = fn._ask("Qwen/Qwen3-4B", 0)
    assert (ask.kind, ask.step, ask.directory) == (Kind.BASELINE, -1, None)


async def test_a_skipped_point_is_skipped_in_miles_with_the_same_reason(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemon: FakeDaemon
) -> None:
    contract = sys.modules["miles.rollout.checkpoint_eval"]
    daemon.script(1, Ending(outcome=Outcome.SKIPPED, reason="pin_violation"))
    fn = made(plug_in, monkeypatch, tmp_path)
    with pytest.raises(contract.EvalSkip) as caught:
        await call(fn, 1, checkpoint(tmp_path, "step_1"))
    assert caught.value.reason == "pin_violation"


async def test_the_timeout_is_skipped_as_deadline(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contract = sys.modules["miles.rollout.checkpoint_eval"]
    monkeypatch.setenv("EVALD_TIMEOUT_S", "0.2")
    fn = made(plug_in, monkeypatch, tmp_path)
    with pytest.raises(contract.EvalSkip) as caught:
        await call(fn, 1, checkpoint(tmp_path, "step_1"))
    assert caught.value.reason == "deadline"


SCORED = {"status": "scored", "digest": "d", "n_tokens": 3, "response": "x", "reference": 7}


async def test_rewards_and_samples_of_a_set(
    plug_in: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    types = sys.modules["miles.utils.types"]
    link = LedgerLink()
    key = PointKey("r", 7)
    link.accept(key)
    link.measure(key, "a", n_total=6, score=0.5)
    link.end(key, metrics={"eval/a": 0.5, "eval/step": 7.0})
    # in the order in which they finished, with what an earlier life of the point has left
    link.rows[key.record_id, "a"] = [
        {**SCORED, "question": "10", "sample": 0, "score": 1.0, "weight_version": "r:7:d:n"},
        {**SCORED, "question": "9", "sample": 1, "score": 0.0, "truncated": True},
        {"question": "9", "sample": 0, "digest": "d", "status": "error"},
        {**SCORED, "question": "10", "sample": 1, "status": "grader_error"},
        {**SCORED, "question": "9", "sample": 0, "score": 0.5},
        {"question": "11", "sample": 0, "digest": "d", "status": "timeout"},
        {**SCORED, "question": "10", "sample": 1, "score": 0.0, "digest": "other"},
    ]
    fn = made(plug_in, monkeypatch, tmp_path, reward_key="acc")
    fn._link = link
    results = await fn._data(key.record_id, "d", link.records(0)[1:2])
    found = results["a"]
    # the sixth sample was cut by a deadline, and has left no row
    assert found["rewards"] == [0.5, 0.0, 1.0, None, None, None]
    assert found["truncated"] == [False, True, False, False, False, False]
    samples = found["samples"]
    assert [sample.index for sample in samples] == list(range(6))
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, None]
    status = types.Sample.Status
    assert [sample.status for sample in samples] == [
        status.COMPLETED,
        status.TRUNCATED,
        status.COMPLETED,
        status.COMPLETED,
        status.ABORTED,
        status.ABORTED,
    ]
    assert samples[2].get_reward_value(Namespace(reward_key="acc")) == 1.0
    assert (samples[2].response, samples[2].response_length, samples[2].label) == ("x", 3, "7")
    assert samples[2].metadata["weight_version"] == "r:7:d:n"


def test_the_environment_decides_how_evald_is_reached(plug_in: ModuleType, tmp_path: Path) -> None:
    root = str(tmp_path)
    here = plug_in.Settings({"EVALD_ROOT": root, "EVALD_RESULTS": root, "EVALD_RUN": "mine"})
    assert isinstance(here.link(), FileLink)
    assert (here.run, here.timeout_s) == ("mine", 14_400.0)
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    far = plug_in.Settings({
        "EVALD_DESTINATION": str(tmp_path / "far"),
        "EVALD_URL": "http://127.0.0.1:1",
        "EVALD_TOKEN_FILE": str(token),
        "EVALD_TIMEOUT_S": "60",
        "EVALD_RUN": "",
    })  # fmt: skip
    assert isinstance(far.link(), HttpLink)
    assert far.hand().func is hand_over
    assert (far.run, far.timeout_s) == (None, 60.0)


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        ({}, "give one of EVALD_ROOT and EVALD_DESTINATION"),
        ({"EVALD_ROOT": "/r", "EVALD_DESTINATION": "h:/r"}, "give one of EVALD_ROOT and"),
        ({"EVALD_DESTINATION": "h:/r"}, "EVALD_DESTINATION needs EVALD_URL"),
        ({"EVALD_ROOT": "/r", "EVALD_RESULTS": "/s", "EVALD_URL": "http://h:1"}, "not both"),
        ({"EVALD_ROOT": "/r", "EVALD_TIMEOUT_S": "soon"}, "EVALD_TIMEOUT_S=soon is no number"),
        ({"EVALD_ROOT": "/r", "EVALD_TIMEOUT_S": "-1"}, "EVALD_TIMEOUT_S=-1 is no number"),
    ],
)
def test_a_wrong_environment_is_refused_with_the_remedy(
    plug_in: ModuleType, environment: dict[str, str], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        plug_in.Settings(environment)


async def test_a_directory_at_a_far_host_is_copied_there(
    plug_in: ModuleType, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    far.mkdir()
    settings = plug_in.Settings({"EVALD_DESTINATION": str(far), "EVALD_URL": "http://127.0.0.1:1"})
    directory = checkpoint(tmp_path, "step_3")
    (directory / ".complete").touch()
    hand = settings.hand()
    await asyncio.to_thread(hand, plug_in.Ask(3, directory), "r")
    assert (far / "step_3" / "model.safetensors").read_text() == "w"
    assert (far / "step_3" / ".complete").exists()
    await asyncio.to_thread(hand, plug_in.Ask(-1, directory, Kind.BASELINE), "r")
    assert json.loads((far / "baseline_-1.request").read_bytes()) == {
        "run": "r",
        "kind": "baseline",
        "step": -1,
    }
