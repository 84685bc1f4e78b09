"""Procedural sets with the real library, in the processes that it runs in."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import rig

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.graders import Rules, Sample
from evald.evals.grading import Grading
from evald.evals.procedural.made import library_version, made_set
from evald.evals.procedural.probe import probe_all
from evald.evals.procedural.tasks import CHECKED_VERSION, FIT, UNFIT, Unfit
from evald.evals.sets import load_set
from evald.evals.worker_pool import WorkerPool
from evald.results.modes import Modes
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

#: refused tasks that are quickly found out, one for each reason.
FOUND_OUT = (
    "complex_arithmetic",
    "game_of_life_halting",
    "isomorphic_strings",
    "n_queens",
    "prime_factorization",
    "rearc",
    "rush_hour",
    "composite",
)


def one_set(**fields: Any) -> EvalSet:
    given = {"name": "sums", "kind": "procedural", "task": "chain_sum", "task_size": 6, **fields}
    return msgspec.convert({"grader": "reasoning_gym", **given}, EvalSet)


def make(one: EvalSet, directory: Path, **environ: str) -> EvalSet:
    return made_set(one, directory, modes=Modes(), environ={**os.environ, **environ})


@pytest.mark.timeout(240)
def test_listed_tasks_are_fit_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list, derived anew with few questions: python -m evald.evals.procedural.probe."""
    assert library_version() == CHECKED_VERSION
    # (some tasks run programs that write files where they are)
    monkeypatch.chdir(tmp_path)
    found = probe_all([*sorted(FIT), *FOUND_OUT], size=4, hash_seeds=(0, 1))
    unfit = {task: one for task, one in found.items() if one.unfit is not None}
    assert unfit.keys() == set(FOUND_OUT), unfit
    assert {task: one.unfit for task, one in unfit.items()} == {
        task: UNFIT[task] for task in FOUND_OUT
    }
    assert {one.unfit for one in unfit.values()} >= {Unfit.HASH_SEED, Unfit.RUNS_CODE}


def test_a_file_is_made_once_and_always_the_same(tmp_path: Path) -> None:
    one = one_set(task_prompt="Solve. {question}", task_config={"max_terms": 3}, task_seed=5)
    path = Path(make(one, tmp_path / "a").path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 6
    assert all(row["prompt"] == f"Solve. {row['metadata']['question']}" for row in rows)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list((tmp_path / "a").iterdir()) == [path]
    before = path.stat()
    assert make(one, tmp_path / "a").path == str(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    again = Path(make(one, tmp_path / "b", PYTHONHASHSEED="77").path)
    assert (again.name, again.read_bytes()) == (path.name, path.read_bytes())
    loaded = load_set(make(one, tmp_path / "a"))
    assert [question.prompt for question in loaded.questions] == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"max_term": 3}, "task_config.max_term: unknown key; did you mean 'max_terms'?"),
        ({"size": 3}, "task_config.size: set task_size instead"),
        ({"max_terms": 0}, "task_config: AssertionError"),
    ],
)
def test_settings_that_the_task_does_not_take(
    tmp_path: Path, config: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=f"cannot make eval set 'sums': {fault[:20]}") as caught:
        make(one_set(task_config=config), tmp_path)
    assert fault in str(caught.value)
    assert not list(tmp_path.iterdir())


async def test_the_librarys_verifier_grades(tmp_path: Path) -> None:
    ready = make(one_set(grader="boxed_reasoning_gym"), tmp_path)
    loaded = load_set(ready)
    rules = Rules.of(ready, version=loaded.grader_version)
    workers = WorkerPool()
    grading = Grading(workers)
    try:
        for question in loaded.questions[:2]:

            async def grade(text: str, question: Any = question) -> Any:
                sample = Sample(
                    response=text, label=question.label, metadata=question.metadata, question="q"
                )
                return await grading.grade(rules, sample, timeout_s=60)

            right = await grade(f"so it is \\boxed{{ {question.label} }}")
            assert (right.score, right.answer) == (1.0, question.label)
            assert (await grade("\\boxed{junk}")).score == 0.0
            assert (await grade("\\boxed{}")).no_answer
            assert (await grade(question.label)).no_answer
    finally:
        await grading.close()
        await workers.close()


_SETS = """
[[eval]]
name = "sums"
kind = "procedural"
task = "chain_sum"
task_size = 60
task_config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
apply_chat_template = true
grader = "boxed_reasoning_gym"
"""


def test_a_daemon_measures_with_made_questions(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python")) as r:
        r.config.write_text(r.config.read_text() + _SETS)
        checked = r.evald("check", str(r.config))
        assert checked.returncode == 0, checked.stderr
        assert "eval set sums: 60 questions" in checked.stdout
        # to look leaves nothing behind
        assert not r.results.parent.exists()
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        point = r.point(1, timeout_s=60)
        assert point.outcome == "ok", point.detail
        made_by = point.provenance["sets"]["sums"]
        path = Path(made_by["path"])
        assert path.parent == r.results.parent / "data"
        assert "reasoning-gym 0.1.25" in made_by["grader_version"]
        labels = [json.loads(line)["label"] for line in path.read_text().splitlines()]
        assert 0 < labels.count("7") < 60
        assert point.metrics["eval/sums"] == pytest.approx(labels.count("7") / 60)
        assert r.stop() == 0
