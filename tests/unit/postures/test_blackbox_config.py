"""The table [blackbox]: what is accepted, what each refusal says, and what is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.blackbox.sglang_reference import SGLangReference
from evald.config import BlackBox
from evald.engines.gpus import known_gpus, visible_gpus
from evald.postures.blackbox.config import check_black_box, fill_in
from evald.postures.blackbox.process import environment


def table(**settings: Any) -> BlackBox:
    return msgspec.convert(settings, BlackBox)


def test_a_class_or_a_command_is_enough() -> None:
    assert check_black_box(table(**{"class": "my.evals:Judge"})) == []
    assert check_black_box(table(command=["evaluate", "{dir}", "--out={output}"])) == []
    assert check_black_box(table(command=["evaluate", "{dir}", "{output_dir}"])) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "exactly one of class and command must be set, got none"),
        (
            {"class": "a:B", "command": ["x", "{output}"]},
            "exactly one of class and command must be set, got both",
        ),
        ({"class": "my.evals.Judge"}, 'must be "module:Class", such as "my_evals:Judge", got'),
        ({"command": []}, "must name a program, got nothing"),
        ({"command": ["", "{output}"]}, "must name a program, got nothing"),
        ({"command": ["x", "{dir}"]}, "has neither {output} nor {output_dir}"),
        (
            {"command": ["x", "{outptu}", "{output}"]},
            "unknown placeholder {outptu}; did you mean {output}? known are {dir}, {step}, ",
        ),
        ({"command": ["x", "{q}", "{output}"]}, "write {{q}} to pass it on"),
        ({"command": ["x", "{output}"], "python": "p"}, "config and python belong to class"),
        ({"command": ["x", "{output}"], "config": {"a": 1}}, "config and python belong to class"),
    ],
)
def test_each_fault_is_a_sentence(settings: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in check_black_box(table(**settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0},
        {"start_timeout_s": -1},
        {"stop_grace_s": -1},
        {"keep_logs": 0},
        {"comand": []},
    ],
)
def test_each_field_has_its_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        table(**settings)


def test_placeholders_are_filled_in_and_nothing_else() -> None:
    values = {"dir": "/s/step_4", "step": "4", "output": "/o/{dir}"}
    command = [
        "x",
        "--dir={dir}",
        "{step}{step}",
        '{"a": {"b": {}}}',
        "{{dir}}",
        "{output}",
        "$HOME",
    ]
    assert fill_in(command, values) == [
        "x",
        "--dir=/s/step_4",
        "44",
        '{"a": {"b": {}}}',
        "{dir}",
        "/o/{dir}",  # what was filled in is not looked at again
        "$HOME",
    ]


def test_the_environment_is_a_chosen_one() -> None:
    environ = {"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "s", "MY_KEY": "k", "OTHER": "o"}
    env = environment(table(pass_env=["MY_KEY"], env={"HF_HOME": "/mine", "A": "b"}), environ)
    assert env == {
        "PYTHONUNBUFFERED": "1",
        "PATH": "/bin",
        "HF_HOME": "/mine",
        "MY_KEY": "k",
        "A": "b",
    }


def test_the_reference_takes_the_gpus_that_it_is_given(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path), "gpus": "2,3", "data": str(tmp_path / "d.jsonl")}
    (tmp_path / "d.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    reference = SGLangReference(settings)
    # by number where no nvidia-smi knows their UUIDs
    assert reference._launcher()._plan.gpus == visible_gpus("2,3", known_gpus())
