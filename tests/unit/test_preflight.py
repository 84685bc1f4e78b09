"""What is known before anything starts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.config import Config
from evald.config_load import build_config
from evald.errors import ConfigError, EvaldError
from evald.preflight import preflight
from evald.testing import write_base_model, write_snapshot


def config(tmp_path: Path, **staging: Any) -> Config:
    if not (tmp_path / "base").exists():
        write_base_model(tmp_path / "base")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    raw = {
        "staging": {"root": "root", **staging},
        "results": {"dir": "results"},
        "fleet": {"model": "base", "device": "cpu"},
        "eval": [{"name": "a", "path": "a.jsonl"}],
    }
    return build_config(raw, base=tmp_path, environ={})


def problems(one: Config) -> str:
    with pytest.raises(ConfigError) as error:
        preflight(one)
    return "\n".join(error.value.problems)


def test_a_good_config_says_what_the_root_must_hold(tmp_path: Path) -> None:
    checked = preflight(config(tmp_path))
    assert [loaded.eval_set.name for loaded in checked.sets] == ["a"]
    assert any("up to 5 snapshots" in note for note in checked.notes)


def test_a_budget_below_the_peak_is_a_warning(tmp_path: Path) -> None:
    notes = preflight(config(tmp_path, max_bytes=1000)).notes
    assert any(note.startswith("WARNING: staging.max_bytes = 1000") for note in notes)


def test_samples_that_will_be_equal_are_a_warning(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    fields = "path: a.jsonl, rm_type: f1, n_samples_per_eval_prompt: 4"
    (tmp_path / "eval.yaml").write_text(
        f"datasets: {{y: {{{fields}}}, warm: {{{fields}, temperature: 1}}}}"
    )
    scored = {"name": "p", "path": "a.jsonl", "kind": "perplexity"}
    raw = {
        "staging": {"root": "root"},
        "results": {"dir": "results"},
        "fleet": {"model": "base", "device": "cpu"},
        "defaults": {"n_samples_per_eval_prompt": 2},
        "eval": [{"name": "t", "path": "a.jsonl"}, scored],
        "eval_config": "eval.yaml",
    }
    notes = preflight(build_config(raw, base=tmp_path, environ={})).notes
    (note,) = (note for note in notes if "temperature" in note)
    assert note == (
        "WARNING: eval sets 't', 'y': n_samples_per_eval_prompt is above 1 at temperature 0, so "
        "the samples of a question will be equal; raise temperature, or ask once"
    )
    assert not any("temperature" in note for note in preflight(config(tmp_path)).notes)


@pytest.mark.parametrize(
    "state", ["optimizer.pt", "trainer_state.json", "rng_state_0.pth", "x.distcp"]
)
def test_an_owned_root_with_training_state_is_refused(tmp_path: Path, state: str) -> None:
    directory = write_snapshot(tmp_path / "root" / "step_40")
    (directory / state).touch()
    assert "set staging.owned = false" in problems(config(tmp_path))
    preflight(config(tmp_path, owned=False))


def test_a_checkpoint_directory_of_a_framework_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").touch()
    assert "training state" in problems(config(tmp_path))


def test_a_root_that_cannot_be_read_is_looked_at_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by chaos: a failing disk ended the start with a traceback."""
    (tmp_path / "root").mkdir()
    good = config(tmp_path)
    scandir = os.scandir

    def broken(path: Any = ".") -> Any:
        if path == tmp_path / "root":
            raise OSError(errno.EIO, "Input/output error")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(EvaldError, match=r"cannot look into staging root .*: Input/output error"):
        preflight(good)


def test_missing_things_are_named_together(tmp_path: Path) -> None:
    one = config(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "base" / "model.safetensors").unlink()
    (tmp_path / "results").touch()
    text = problems(one)
    for words in ("a.jsonl", "fleet.model", "results.dir"):
        assert words in text


def test_a_broken_base_model_is_named(tmp_path: Path) -> None:
    one = config(tmp_path)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"garbage")
    assert "fleet.model" in problems(one)


def test_an_unknown_group_and_program_are_named(tmp_path: Path) -> None:
    raw = {
        "staging": {"root": "root"},
        "results": {"dir": "results", "group": "no-such-group"},
        "fleet": {"model": "base", "device": "cpu", "python": "/no/such/python"},
        "eval": [{"name": "a", "path": "a.jsonl"}],
        "status": {"socket": "/tmp/" + "x" * 200},
    }
    config(tmp_path)
    text = problems(build_config(raw, base=tmp_path, environ=os.environ))
    for words in ("no-such-group", "fleet.python: /no/such/python is not a program", "socket"):
        assert words in text


def test_no_engines_is_said(tmp_path: Path) -> None:
    raw = {
        "staging": {"root": "root"},
        "results": {"dir": "results"},
        "fleet": {"model": "base", "device": "cpu", "engines": 0},
        "eval": [{"name": "a", "path": "a.jsonl"}],
    }
    config(tmp_path)
    notes = preflight(build_config(raw, base=tmp_path, environ={})).notes
    assert any("no engines" in note for note in notes)


@pytest.mark.parametrize(
    ("engines", "dispatch", "told"),
    [
        (2, {"max_in_flight": 1}, True),
        (1, {"max_in_flight": 1}, False),
        (2, {}, False),
        (2, {"max_in_flight": 1, "rolling": False}, False),
    ],
)
def test_engines_that_wait_for_the_last_answers_are_told_of(
    tmp_path: Path, engines: int, dispatch: dict[str, Any], *, told: bool
) -> None:
    raw = {
        "staging": {"root": "root"},
        "results": {"dir": "results"},
        "dispatch": dispatch,
        "fleet": {"model": "base", "device": "cpu", "engines": engines},
        "eval": [{"name": "a", "path": "a.jsonl"}],
    }
    config(tmp_path)
    notes = preflight(build_config(raw, base=tmp_path, environ={})).notes
    assert any("points do not overlap" in note for note in notes) is told


def test_the_environment_is_read_once(tmp_path: Path) -> None:
    environ = {**os.environ, "KEY": "at the start"}
    checked = preflight(config(tmp_path), environ=environ)
    environ["KEY"] = "later"
    assert checked.environ["KEY"] == "at the start"


def test_a_preset_says_what_it_stands_for_and_who_deletes(tmp_path: Path) -> None:
    notes = "\n".join(preflight(config(tmp_path, preset="hf-trainer")).notes)
    assert (
        "staging.preset 'hf-trainer': a snapshot is checkpoint-{step} in the staging root or in a "
        "run's folder there, and finished when trainer_state.json is whole"
    ) in notes
    assert "evald deletes nothing in the staging root: the trainer does" in notes
    assert "at the peak" not in notes
    notes = "\n".join(preflight(config(tmp_path, preset="miles", marker="DONE")).notes)
    assert "finished when it has DONE" in notes
    assert "(staging.owned = false): somebody else must" in notes


def test_a_set_that_the_ledger_knows_otherwise_is_said_or_refused(tmp_path: Path) -> None:
    one = config(tmp_path)
    loaded = preflight(one).sets[0]
    told = {"config": "c", "data": loaded.data_digest, "settings": "other"}
    record = {
        "type": "point", "schema": 1, "seq": 1, "time": 1.0, "run": "run", "step": 40,
        "revision": 0, "record_id": "run/step/40/r0", "outcome": "ok",
        "provenance": {"sets": {"a": told}},
    }  # fmt: skip
    one.results_file.parent.mkdir()
    one.results_file.write_text(json.dumps(record) + "\n")
    sentence = "eval set 'a' is not what run 'run' was measured with until step 40: other settings"
    assert f"WARNING: {sentence}; its curve breaks" in preflight(one).notes
    refuse = msgspec.structs.replace(one.dispatch, on_set_change="refuse")
    refused = msgspec.structs.replace(one, dispatch=refuse)
    assert problems(refused).startswith(f"{sentence}; restore it")
    other = msgspec.structs.replace(refused, run="another")
    assert not any("curve" in note for note in preflight(other).notes)
    with one.results_file.open("a") as file:
        end = {**record, "type": "run_end", "seq": 2, "record_id": "x", "points": {}}
        file.write(json.dumps(end) + "\n")
    assert not any("curve" in note for note in preflight(refused).notes)
    one.results_file.write_text("broken\nbroken\n")
    preflight(refused)
