from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.config import EvalSet
from evald.config_load import build_config
from evald.errors import ConfigError
from evald.evals.kinds import kind_of
from evald.evals.procedural import made
from evald.evals.procedural.made import made_set
from evald.evals.procedural.tasks import FIT, UNFIT, task_fault
from evald.results.modes import Modes


def one_set(**fields: Any) -> EvalSet:
    given = {"name": "sums", "kind": "procedural", "task": "chain_sum", **fields}
    return msgspec.convert({"grader": "reasoning_gym", **given}, EvalSet)


def test_a_task_is_fit_or_refused_with_the_reason() -> None:
    assert not FIT & UNFIT.keys()
    assert len(FIT) + len(UNFIT) == 106
    assert task_fault("chain_sum") is None
    assert task_fault("word_ladder") == (
        "'word_ladder' cannot be had: its questions change with Python's hash seed"
    )
    assert "gives junk answers full marks" in str(task_fault("game_of_life_halting"))
    assert "runs the answer as Python code" in str(task_fault("n_queens"))
    assert "raises an error on junk answers" in str(task_fault("prime_factorization"))
    assert "'chain_sums' is unknown; did you mean 'chain_sum'?" in str(task_fault("chain_sums"))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"grader": "boxed_reasoning_gym"}, None),
        ({"grader": "boxed_math"}, None),
        ({"grader": "resoning_gym"}, "grader: 'resoning_gym' is unknown"),
        ({"task": None}, 'task: kind "procedural" needs one'),
        ({"task": "n_queens"}, "task: 'n_queens' cannot be had"),
        ({"stop": [""]}, "stop: the empty string"),
    ],
)
def test_faults_of_the_settings(fields: dict[str, Any], fault: str | None) -> None:
    faults = kind_of(one_set(**fields)).check()
    assert len(faults) == (fault is not None)
    assert fault is None or faults[0].startswith(fault)


def config(tmp_path: Path, *, defaults: dict[str, Any] | None = None, **fields: Any) -> EvalSet:
    raw = {
        "staging": {"root": "/dev/shm/x"},
        "results": {"dir": "results"},
        "attached": {"model": "base", "urls": ["http://h:1"]},
        "defaults": defaults or {},
        "eval": [{"name": "sums", **fields}],
    }
    return build_config(raw, base=tmp_path, environ={}).eval[0]


def test_such_a_set_brings_its_own_grader_and_data(tmp_path: Path) -> None:
    defaults = {"grader": "regex", "regex": "x", "grader_config": {"a": 1}}
    one = config(tmp_path, defaults=defaults, kind="procedural", task="chain_sum")
    assert (one.grader, one.grader_config, one.path) == ("reasoning_gym", {}, "")
    one = config(tmp_path, kind="procedural", task="gcd", grader="boxed_reasoning_gym")
    assert one.grader == "boxed_reasoning_gym"
    with pytest.raises(ConfigError, match="path: kind 'procedural' makes its own questions"):
        config(tmp_path, kind="procedural", task="gcd", path="x.jsonl")
    with pytest.raises(ConfigError, match="task: only kind 'procedural' has one"):
        config(tmp_path, path="x.jsonl", task="gcd")
    with pytest.raises(ConfigError, match=r"task_prompt: must be text with \{question\} in it"):
        config(tmp_path, kind="procedural", task="gcd", task_prompt="solve it")


def test_what_was_made_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library being run: its file is there."""
    names = []
    variants: list[dict[str, Any]] = [
        {},
        {"task_seed": 1},
        {"task_size": 5},
        {"task_config": {"max_terms": 3}},
        {"task_prompt": "{question}!"},
    ]

    def make(_set: EvalSet, path: Path, *_: Any) -> None:
        names.append(path.name)
        path.write_text("")

    monkeypatch.setattr(made, "_make", make)
    for _ in range(2):
        for fields in variants:
            one = one_set(**fields, cluster_key="family", temperature=0.7)
            ready = made_set(one, tmp_path, modes=Modes(), environ={})
            assert ready.path.startswith(str(tmp_path / "chain_sum-"))
            assert (ready.grader, ready.cluster_key, ready.temperature) == ("python", None, 0.7)
            assert ready.grader_config["version"] == "reasoning-gym 0.1.25"
    assert len(names) == len(set(names)) == len(variants)
    boxed = made_set(one_set(grader="boxed_reasoning_gym"), tmp_path, modes=Modes(), environ={})
    assert boxed.grader == "boxed_python"
    own = made_set(one_set(grader="boxed_math"), tmp_path, modes=Modes(), environ={})
    assert (own.grader, own.grader_config) == ("boxed_math", {})


def test_another_version_of_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [one_set(), one_set(task="gcd"), one_set(kind="generate", path="x")]
    assert made.library_notes(sets) == []
    monkeypatch.setattr(made, "CHECKED_VERSION", "0.1.24")
    (note,) = made.library_notes(sets)
    assert note.endswith("check yours: python -m evald.evals.procedural.probe chain_sum gcd")
    assert made.library_notes([]) == []


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_LIBRARY", "no-such-library")
    with pytest.raises(ConfigError, match=r"install evald\[procedural\]"):
        made_set(one_set(), tmp_path, modes=Modes(), environ={})
