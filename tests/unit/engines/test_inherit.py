from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_sglang import small_sglang

from evald.config import Inherit
from evald.config_check import check_inherit
from evald.engines.inherit import (
    Inherited,
    read_inherited,
)
from evald.engines.launch_words import engine_call_values, launch_command_words
from evald.engines.server_info import launch_command_of
from evald.errors import ConfigError
from evald.text import hide_secrets

SGLANG = small_sglang()


def read(
    base: Path | None = None, environ: dict[str, str] | None = None, **table: Any
) -> Inherited:
    return read_inherited(Inherit(**table), base=base, arguments=SGLANG, environ=environ or {})


def values(inherited: Inherited) -> dict[str, Any]:
    return {name: setting.value for name, setting in inherited.settings.items()}


def problem(**table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**table)
    (sentence,) = caught.value.problems
    return sentence


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tp 8", {"tp_size": 8}),
        ("--tp-size=8", {"tp_size": 8}),
        ("--tensor-parallel-size 8", {"tp_size": 8}),
        ("--ep 8", {"ep_size": 8}),
        ("--ep-size 4 --ep 8", {"ep_size": 8}),
        ("--enable-dp-attention", {"enable_dp_attention": True}),
        ("--enable-hicache", {"enable_hierarchical_cache": True}),
        ("--enable-tf32-matmul", {"enable_tf32_matmul": True}),
        ("--no-enable-tf32-matmul", {"enable_tf32_matmul": False}),
        ("--cuda-graph-bs 1 2 4 --tp 2", {"cuda_graph_bs": [1, 2, 4], "tp_size": 2}),
        ("--lora-paths", {"lora_paths": []}),
        ("--chunked-prefill-size -1", {"chunked_prefill_size": -1}),
        ("--context-length 16k", {"context_length": 16000}),
        ("--context-length 1.5M", {"context_length": 1_500_000}),
        ("--context-length 16Ki", {"context_length": 16384}),
        ("--context-length 1.5Ki", {"context_length": "1.5Ki"}),
        ("--context-length much", {"context_length": "much"}),
        ("--mem-fraction-static .8", {"mem_fraction_static": 0.8}),
        ("--mem-fraction-static ''", {"mem_fraction_static": ""}),
        ("--model-checksum", {"model_checksum": ""}),
        ("--monokernel-backend amd", {"enable_amd_monokernel": True}),
        ("--fp8-gemm-backend triton", {"fp8_gemm_runner_backend": "triton"}),
        (
            """--json-model-override-args '{"a": 1, "b": "x y"}'""",
            {"json_model_override_args": '{"a": 1, "b": "x y"}'},
        ),
        ("--not-yet-known 3 --another", {"not_yet_known": "3", "another": True}),
        ("--another=x --tp 2", {"another": "x", "tp_size": 2}),
        ("", {}),
    ],
)
def test_words(words: str, expected: dict[str, Any]) -> None:
    inherited = read(command=f"sglang serve {words}")
    assert values(inherited) == expected
    assert {s.origin for s in inherited.settings.values()} <= {"[fleet.inherit] command"}
    assert not inherited.notes


@pytest.mark.parametrize(
    "before",
    [
        "",
        "python -m sglang.launch_server ",
        "/opt/venv/bin/python3 -W ignore -m sglang.launch_server ",
        "python /src/sglang/launch_server.py ",
        "sglang serve ",
        "/opt/venv/bin/sglang serve ",
        "sglang serve meta/llama ",
        "sglang serve --model-type llm ",
        "docker run --gpus all --ipc=host image python3 -m sglang.launch_server ",
        "cd /srv && exec nohup sglang serve \\\n  ",
    ],
)
@pytest.mark.parametrize("after", ["", " > log 2>&1 &", " 2>err", " | tee log", " ; echo ended"])
def test_only_the_server_arguments_of_a_command_count(before: str, after: str) -> None:
    assert values(read(command=f"{before}--tp 8 \\\n  --dtype bfloat16{after}")) == {
        "tp_size": 8,
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize(
    "command", ["NCCL_DEBUG=INFO HF_TOKEN=s3cret --tp 8", "env HF_TOKEN=s3cret sglang serve --tp 8"]
)
def test_environment_is_named_without_its_values(command: str) -> None:
    inherited = read(command=command)
    assert values(inherited) == {"tp_size": 8}
    (note,) = inherited.notes
    assert "HF_TOKEN" in note
    assert "s3cret" not in note


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("python train.py --tp 8", "fleet.inherit.command: must hold 'sglang serve' or"),
        ("A=1", "fleet.inherit.command: must hold 'sglang serve' or"),
        ("sglang serve --dtype 'auto", "fleet.inherit.command: cannot split it into words: No"),
        (
            "sglang serve -tp 8",
            "cannot read [fleet.inherit] command: '-tp' is no server argument and belongs to none",
        ),
        (
            "sglang serve --tp 8 9",
            "cannot read [fleet.inherit] command: '9' is no server argument and belongs to none",
        ),
        ("sglang serve --tp", "cannot read [fleet.inherit] command: argument --tp-size/--tensor-"),
        ("sglang serve --e 8", "cannot read [fleet.inherit] command: ambiguous option: --e could"),
    ],
)
def test_a_command_that_cannot_be_read(command: str, sentence: str) -> None:
    assert problem(command=command).startswith(sentence)


def test_config_file_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "rollout.yaml").write_text("tp: 8\ndtype: bfloat16\nenable-eplb: true\n")
    inherited = read(command="sglang serve --config rollout.yaml --dtype auto", base=tmp_path)
    assert values(inherited) == {"tp_size": 8, "dtype": "auto", "enable_eplb": True}
    assert inherited.settings["dtype"].origin == "[fleet.inherit] command"
    assert inherited.settings["tp_size"].origin.endswith("rollout.yaml")
    sentence = problem(command="sglang serve --config=gone.yaml", base=tmp_path)
    assert sentence.startswith("fleet.inherit.command: --config: cannot read")


TABLE = {"tp-size": 8, "dp_size": "2", "context_length": "16k", "cuda_graph_bs": [1, 2]}
READ = {"tp_size": 8, "dp_size": 2, "context_length": 16000, "cuda_graph_bs": [1, 2]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(TABLE)),
        ("a.yaml", json.dumps(TABLE)),
        ("a.YML", "tp-size: 8\ndp_size: '2'\ncontext_length: 16k\ncuda_graph_bs: [1, 2]"),
        ("a.toml", 'tp-size = 8\ndp_size = "2"\ncontext_length = "16k"\ncuda_graph_bs = [1, "2"]'),
    ],
)
def test_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    inherited = read(file=name, base=tmp_path)
    assert values(inherited) == READ
    assert inherited.settings["tp_size"].origin == f"[fleet.inherit] file {tmp_path / name}"


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"dtype": None}, {}),
        ({"enable_metrics": False}, {"enable_metrics": False}),
        ({"cuda_graph_bs": 4}, {"cuda_graph_bs": [4]}),
        ({"tp": 4, "ep": 2}, {"tp_size": 4, "ep_size": 2}),
        ({"json_model_override_args": {"a": 1}}, {"json_model_override_args": {"a": 1}}),
        ({"some-new-thing": [1]}, {"some_new_thing": [1]}),
    ],
)
def test_table(tmp_path: Path, table: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(table))
    assert values(read(file="a.json", base=tmp_path)) == expected


def test_an_empty_file_inherits_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    assert values(read(file="a.yaml", base=tmp_path)) == {}


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert "no regular file" in problem(file="a.json", base=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("gone.json", None, "fleet.inherit.file: cannot read"),
        ("a.ini", "", "fleet.inherit.file: a.ini must end in .json, .toml, .yaml, .yml"),
        ("a.json", "{", "fleet.inherit.file: cannot parse"),
        ("a.yaml", "a: [", "fleet.inherit.file: cannot parse"),
        ("a.toml", "a = ", "fleet.inherit.file: cannot parse"),
        ("a.json", "[1]", "fleet.inherit.file: "),
        ("a.json", '{"tp": 1, "tp_size": 2}', "[fleet.inherit] file "),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, name: str, text: str | None, sentence: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert problem(file=name, base=tmp_path).startswith(sentence)


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("tp: 1")
    assert "has no PyYAML; install it, or give" in problem(file="a.yaml", base=tmp_path)


@pytest.mark.parametrize(
    ("table", "sentences"),
    [
        ({}, ["fleet.inherit: set exactly one of file, command and url, got none of them"]),
        (
            {"file": "a.json", "url": "http://a:1"},
            ["fleet.inherit: set exactly one of file, command and url, got file and url"],
        ),
        (
            {"file": "a.json", "api_key_env": "KEY"},
            ["fleet.inherit.api_key_env: only a url needs a key; remove it"],
        ),
        (
            {"url": "http://a:1", "api_key_env": "KEY", "api_key_file": "k"},
            ["fleet.inherit.api_key_file: api_key_env is set, too; keep one"],
        ),
        (
            {"url": "a:30000"},
            ["fleet.inherit.url: 'a:30000' is no URL; write http://host:port"],
        ),
        ({"url": "https://a:1", "api_key_file": "k"}, []),
    ],
)
def test_the_table_itself(table: dict[str, Any], sentences: list[str]) -> None:
    assert check_inherit(Inherit(**table)) == sentences


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    assert problem(url=url, api_key_env="KEY").endswith("environment variable KEY is not set")
    sentence = problem(url=url, api_key_file="key", base=tmp_path)
    assert sentence.startswith("fleet.inherit.api_key_file: cannot read")


@pytest.mark.parametrize(
    "argv",
    [
        ["--tp", "8", "--enable-dp-attention", "--trust-remote-code"],
        ["--json-model-override-args", '{"a": 1, "b": "x y"}', "--tp=8"],
        ['--json-model-override-args={"a": 1}', "--ep", "8"],
        ["--cuda-graph-bs", "1", "2", "--chunked-prefill-size", "-1"],
        ["--lora-paths", '{"lora_name": "a", "lora_path": "/a b"}', "c=/c", "--dtype", "auto"],
        ["--served-model-name", "two words", "--enable-metrics"],
        ["--served-model-name", ""],
        ["--no-enable-tf32-matmul", "--not-yet-known", "3"],
        ["--model-checksum"],
    ],
)
def test_launch_command_is_joined_without_quotes(argv: list[str]) -> None:
    assert values(read_words(launch_command_words(" ".join(argv), SGLANG))) == values(
        read_words(argv)
    )


def read_words(words: list[str]) -> Inherited:
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    return read(command=f"sglang serve {quoted}")


def test_a_server_that_was_made_by_the_python_class() -> None:
    call = (
        "Engine(model_path='/m', tp_size=8, log_level='error', lora_paths=None, cuda_graph_bs=[1])"
    )
    assert engine_call_values(call) == {
        "model_path": "/m",
        "tp_size": 8,
        "log_level": "error",
        "lora_paths": None,
        "cuda_graph_bs": [1],
    }
    for bad in ("Engine(a=<object at 0x7f>)", "Engine(a=b)", "Engine('/m')", "Engine(a=1).b"):
        with pytest.raises(ValueError, match=r"."):
            engine_call_values(bad)


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (401, b"", "wants another API key (answer 401); set fleet.inherit.api_key_env or"),
        (404, b"", "/server_info answers 404; is it a SGLang server?"),
        (200, b"<html>", "/server_info answers no JSON table; is it a SGLang server?"),
        (200, b'{"tp_size": 8, "version": "0.4.1"}', "how it was launched (SGLang 0.4.1, started"),
        (200, b'{"launch_command": null, "tp_size": 8}', "does not say how it was launched"),
    ],
)
def test_an_answer_without_a_launch_command(status: int, body: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_command_of("http://a:1", status, body)
    assert caught.value.problems[0].startswith("fleet.inherit.url: http://a:1")
    assert sentence in caught.value.problems[0]


def test_of_an_answer_only_the_launch_command_counts() -> None:
    body = b'{"launch_command": "--tp 8", "tp_size": 8, "mem_fraction_static": 0.7}'
    assert launch_command_of("http://a:1", 200, body) == "--tp 8"


def test_a_command_is_shown_without_its_secrets() -> None:
    command = (
        "HF_TOKEN='a b' A_KEY=c NCCL_DEBUG=INFO sglang serve --api-key d --admin-api-key=e "
        "--api f --max-total-tokens 5 --ssl-keyfile-password 'g h' --tp 8"
    )
    assert hide_secrets(command) == (
        "HF_TOKEN=(hidden) A_KEY=(hidden) NCCL_DEBUG=INFO sglang serve --api-key (hidden) "
        "--admin-api-key=(hidden) --api (hidden) --max-total-tokens 5 "
        "--ssl-keyfile-password (hidden) --tp 8"
    )
