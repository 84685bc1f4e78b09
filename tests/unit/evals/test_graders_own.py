from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from evald.config_load import build_config
from evald.errors import ConfigError
from evald.evals.graders import (
    RM_TYPES,
    Grade,
    GraderFailed,
    RmType,
    Rules,
    Sample,
    check_grader,
    grade,
    grader_for,
    grader_version,
)
from evald.evals.graders import python as python_grader
from evald.evals.graders.remote import RemoteSettings, read_verdicts, request
from evald.evals.graders.verdict import verdict
from evald.evals.sets import load_set
from evald.evals.user_code import unready_graders


class Scalar:
    """A number of some array library."""

    def item(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("result", "score"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (False, 0.0), (Scalar(), 0.25), ({"score": 1}, 1.0)],
)
def test_a_users_grader_answers_with_a_number_or_an_object(result: Any, score: float) -> None:
    assert verdict(result).score == score


def test_an_object_may_say_more() -> None:
    whole = {"score": 0.5, "answer": "7", "reason": "close", "model": "judge"}
    assert verdict(whole) == Grade(0.5, answer="7", reason="close")
    assert verdict({"acc": 1, "score": 0}, score_key="acc").score == 1.0
    assert verdict({"no_answer": True, "reason": "silent"}) == Grade(
        0.0, no_answer=True, reason="silent"
    )
    assert verdict(Grade(1.0, reason="mine")) == Grade(1.0, reason="mine")
    assert verdict(Grade(1.0, answer="\ud83d", reason="\ud83d")) == Grade(
        1.0, answer="\\ud83d", reason="\\ud83d"
    )
    assert len(verdict({"score": 1, "reason": "x" * 10**6}).reason) < 10**4


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "must be a number, true or false, but is None"),
        ("1", "must be a number, true or false, but is '1'"),
        ([1], "must be a number"),
        (math.nan, "must be finite, but is nan"),
        (10**400, "must be finite, but is inf"),
        ({"sore": 1}, "has no 'score' \\(it has sore\\)"),
        ({}, "has no 'score' \\(it has nothing\\)"),
        ({"score": {}}, "must be a number"),
        (Fraction(1, 2), "must be a number"),
        (Grade(math.inf), "must be finite"),
    ],
)
def test_anything_else_is_a_failure_of_the_grader(result: Any, sentence: str) -> None:
    with pytest.raises(GraderFailed, match=sentence):
        verdict(result)


# --- python ------------------------------------------------------------------------------------

MODULE = """
import asyncio
def equal(response, reference, metadata):
    return response == reference
async def later(response, reference, metadata):
    await asyncio.sleep(0)
    return {"score": 0.5, "answer": metadata["kind"]}
def asks(response, reference, metadata, prompt):
    return prompt == "p"
def broken(response, reference, metadata):
    raise ValueError("no such thing\\nin two lines")
nothing = 3
class Box:
    @staticmethod
    def inside(response, reference, metadata):
        return 1
"""


SHAPES = """
async def good(response, reference, *rest, prompt, **more): ...
def two(response, reference): ...
def more(response, reference, metadata, further): ...
def twice(response, prompt, metadata): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of graders that can be imported in this process."""
    path = tmp_path / "graders_of_test.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    python_grader.load.cache_clear()
    yield path
    sys.modules.pop("graders_of_test", None)


def by_python(function: str, path: Path, response: str = "r", label: Any = "r") -> Grade:
    config = {"function": f"graders_of_test:{function}", "cwd": str(path.parent)}
    sample = Sample(response=response, label=label, metadata={"kind": "k"}, prompt="p")
    return grade(Rules("python", config=config), sample)


def test_a_function_of_the_users_grades(module: Path) -> None:
    assert by_python("equal", module).score == 1.0
    assert by_python("equal", module, label={"any": ["json"]}).score == 0.0
    assert by_python("later", module) == Grade(0.5, answer="k", reason="answer: k")
    assert by_python("asks", module).score == 1.0
    assert by_python("Box.inside", module).score == 1.0


def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(
    make_set: Any, tmp_path: Path
) -> None:
    (tmp_path / "shapes.py").write_text(SHAPES)

    def fault(name: str) -> list[str]:
        config = {"function": f"shapes:{name}", "cwd": str(tmp_path)}
        return unready_graders([make_set("", grader="python", grader_config=config)], {})

    assert fault("good") == []
    (sentence,) = fault("two")
    assert sentence == (
        "eval set 'toy': grader 'python': cannot use shapes:two: it must take (response, "
        "reference, metadata), and prompt if it wants that: too many positional arguments"
    )
    assert fault("more")[0].endswith("missing a required argument: 'further'")
    assert fault("twice")[0].endswith("multiple values for argument 'prompt'")


def test_what_a_function_raises_is_a_sentence(module: Path) -> None:
    failure = "graders_of_test:broken raised ValueError: no such thing in two lines"
    with pytest.raises(GraderFailed, match=failure):
        by_python("broken", module)
    with pytest.raises(GraderFailed, match="cannot use graders_of_test:nothing: it is no function"):
        by_python("nothing", module)
    with pytest.raises(GraderFailed, match="cannot import graders_of_test:absent: AttributeError"):
        by_python("absent", module)


def test_the_version_changes_with_the_file_and_not_with_how_it_runs(
    make_set: Any, module: Path
) -> None:
    def version(**more: Any) -> str:
        config = {"function": "graders_of_test:equal", "cwd": str(module.parent), **more}
        return grader_version(make_set("", grader="python", grader_config=config))

    first = version()
    assert version(concurrency=7, pass_env=["X"]) == first
    assert version(version="2") != first
    module.write_text(MODULE + "\n")
    assert version() != first
    assert "missing" in version(function="absent_module:f")
    assert "missing" in version(function="json.absent:f")
    assert "missing" not in version(function="json.decoder:f")


def test_a_command_is_versioned_with_the_files_that_it_names(make_set: Any, tmp_path: Path) -> None:
    def version(*argv: str) -> str:
        config = {"argv": list(argv), "cwd": str(tmp_path)}
        return grader_version(make_set("", grader="command", grader_config=config))

    script = tmp_path / "grade.sh"
    script.write_text("echo 1")
    first = version("sh", "grade.sh")
    assert version("sh", "./grade.sh") != first
    script.write_text("echo 0")
    assert version("sh", "grade.sh") != first
    assert version("sh", "x" * 5000).count("x") == 5000


def test_how_a_grader_runs_does_not_void_what_it_has_graded(make_set: Any) -> None:
    def digest(**more: Any) -> str:
        config = {"url": "http://127.0.0.1:9/", **more}
        rows = [{"prompt": "a", "label": {"x": 1}}]
        return load_set(make_set(rows, grader="remote", grader_config=config)).config_digest

    first = digest()
    name = "TOKEN"
    assert digest(concurrency=1, retries=0, batch=8, token_env=name) == first
    assert digest(reward_key="acc") != first
    assert digest(version="judge-2") != first


# --- remote ------------------------------------------------------------------------------------


def test_a_request_is_what_miles_sends() -> None:
    settings = RemoteSettings(url="http://127.0.0.1:9/rm")
    sample = Sample(response="r", label=7, prompt="p", question="q1")
    assert json.loads(request(settings, [sample])) == {"prompt": "p", "response": "r", "label": 7}
    batched = RemoteSettings(url="http://127.0.0.1:9/rm", batch=2)
    chat = Sample(
        response="r", label=None, prompt=[{"role": "user", "content": "p"}], metadata={"a": 1}
    )
    assert json.loads(request(batched, [chat])) == [
        {
            "prompt": [{"role": "user", "content": "p"}],
            "response": "r",
            "label": None,
            "metadata": {"a": 1},
        }
    ]


def test_answers_of_a_service_are_read_one_by_one() -> None:
    one = RemoteSettings(url="http://127.0.0.1:9/", reward_key="acc")
    assert read_verdicts(one, b"0.5", 1) == [Grade(0.5, reason="answer: -")]
    assert read_verdicts(one, b'{"score": 0, "acc": true}', 1)[0] == Grade(1.0, reason="answer: ")
    many = RemoteSettings(url="http://127.0.0.1:9/", batch=3)
    good, bad = read_verdicts(many, b'[{"score": 1}, "x"]', 2)
    assert isinstance(good, Grade)
    assert "must be a number, true or false, but is 'x'" in str(bad)
    for content, sentence in [
        (b"oops", "did not answer with JSON"),
        (b"[1]", "was sent 2 answers to grade, and gave a list of 1"),
        (b"1", "was sent 2 answers to grade, and gave no list"),
    ]:
        with pytest.raises(GraderFailed, match=sentence):
            read_verdicts(many, content, 2)


# --- config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grader", "config", "fault"),
    [
        ("python", {"function": "a.b:c.d"}, None),
        ("python", {}, "grader_config.function: missing; it must be set"),
        ("python", {"function": "a.b"}, 'grader_config.function: must be "module:function"'),
        ("python", {"func": "a:b"}, "grader_config.func: unknown key; did you mean 'function'?"),
        ("command", {"argv": []}, "grader_config.argv: expected array of length >= 1"),
        ("command", {"argv": ["a"]}, None),
        ("remote", {"url": "https://judge.example/rm", "batch": 4}, None),
        ("remote", {"url": "judge:80"}, "grader_config.url: must be a URL"),
        ("boxed_remote", {"url": "http://h", "retry": 3}, "grader_config.retry: unknown key"),
    ],
)
def test_settings_of_users_graders_are_checked(
    make_set: Any, grader: str, config: dict[str, Any], fault: str | None
) -> None:
    faults = check_grader(make_set("", grader=grader, grader_config=config))
    assert faults == [] if fault is None else faults[0].startswith(fault)


def config_of(tmp_path: Path, defaults: dict[str, Any], **table: Any) -> Any:
    raw = {
        "staging": {"root": str(tmp_path / "root")},
        "results": {"dir": str(tmp_path / "results")},
        "fleet": {"model": str(tmp_path / "model"), "device": "cpu"},
        "defaults": defaults,
        "eval": [{"name": "a", "path": "a.jsonl", **table}],
    }
    return build_config(raw, base=tmp_path, environ={}).eval[0]


def test_settings_belong_to_the_grader_that_they_stand_beside(tmp_path: Path) -> None:
    defaults = {"grader": "number", "grader_config": {"abs_tol": 0.1}}
    assert config_of(tmp_path, defaults).grader_config == {"abs_tol": 0.1}
    assert config_of(tmp_path, defaults, grader="number").grader_config == {"abs_tol": 0.1}
    assert config_of(tmp_path, defaults, grader="math").grader_config == {}
    with pytest.raises(ConfigError, match=r"eval\[0\].grader_config.abs_tol: unknown key"):
        config_of(tmp_path, defaults, grader="f1", grader_config={"abs_tol": 0.1})


def test_users_code_is_found_beside_the_config_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, grader="python", grader_config={"function": "a:b"})
    assert config.grader_config["cwd"] == str(tmp_path)
    config = config_of(
        tmp_path, {}, grader="boxed_command", grader_config={"argv": ["x"], "cwd": "sub"}
    )
    assert config.grader_config["cwd"] == str(tmp_path / "sub")


def test_what_is_missing_here_is_named_before_anything_starts(
    make_set: Any, tmp_path: Path
) -> None:
    def fault(grader: str, **config: Any) -> list[str]:
        one = make_set("", grader=grader, grader_config={"cwd": str(tmp_path), **config})
        return unready_graders([one], {"PATH": "/usr/bin:/bin"})

    (tmp_path / "plain").write_text("no program")
    assert fault("command", argv=["sh", "-c", "echo 1"]) == []
    assert "argv: no-such-program is no program" in fault("command", argv=["no-such-program"])[0]
    assert "argv: ./plain is no program" in fault("command", argv=["./plain"])[0]
    gone = str(tmp_path / "gone")
    assert f"cwd: {gone} is no directory" in fault("command", argv=["sh"], cwd=gone)[0]
    service = make_set(
        "", grader="remote", grader_config={"url": "http://h", "token_env": "JUDGE_TOKEN"}
    )
    assert unready_graders([service], {"JUDGE_TOKEN": "x"}) == []
    (sentence,) = unready_graders([service], {})
    assert sentence == (
        "eval set 'toy': grader 'remote': token_env: environment variable JUDGE_TOKEN is not set; "
        "set it, or remove it"
    )


# --- the names of other trainers -----------------------------------------------------------------


@pytest.mark.parametrize("rm_type", [name for name, one in RM_TYPES.items() if one])
def test_every_rm_type_is_a_grader_or_a_reason(make_set: Any, rm_type: str) -> None:
    for name in (rm_type, f"boxed_{rm_type}"):
        found = grader_for(name)
        if isinstance(found, str):
            assert found.startswith(f"rm_type {name!r} cannot be served: ")
            continue
        fields = {"grader": found.grader, **found.fields}
        if found.grader.endswith("remote"):
            fields["grader_config"] = {"url": "http://127.0.0.1:9/"}
        assert check_grader(make_set("", **fields)) == []


def test_rm_types_grade_as_they_say() -> None:
    assert grader_for("math") == RmType("boxed_math")
    assert grader_for("boxed_math") == RmType("boxed_math")
    assert grader_for("boxed_gpqa") == RmType("boxed_choice", {"choices": "ABCDEFGHIJ"})
    assert "rm_type 'mathh' is unknown; known are math, dapo" in str(grader_for("mathh"))
