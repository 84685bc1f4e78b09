from __future__ import annotations

import tomllib
from typing import Any

import pytest

from evald.engines.sglang_table import check_sglang_table


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"mem_fraction_static": 0.8, "trust-remote-code": True, "chunked_prefill_size": -1},
        {"cuda_graph_bs": [1, 2], "json_model_override_args": {"a": 1}},
        {"skip_tokenizer_init": False, "tokenizer_worker_num": 1, "disaggregation_mode": "null"},
        {"load_format": "auto", "load_balance_method": "round_robin"},
    ],
)
def test_usable(table: dict[str, Any]) -> None:
    assert check_sglang_table(table) == []


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("port = 30000", "evald takes a fresh port for each launch"),
        (
            "tensor_parallel_size = 2",
            "evald gives each engine its GPUs; set [fleet] gpus, engines or gpus_per_engine",
        ),
        (
            'load_format = "dummy"',
            "random weights prove nothing; the engine boots on [fleet] model",
        ),
        ("skip-tokenizer-init = true", "evald needs the server's own text of each answer"),
        (
            'api = "k"',
            "it could stand for api_key, and evald makes a new API key for each launch",
        ),
    ],
)
def test_what_is_not_allowed(entry: str, reason: str) -> None:
    table = tomllib.loads(entry)
    sentence = f"[fleet.sglang] {entry} is not allowed: {reason}; remove it"
    assert check_sglang_table(table) == [sentence]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"--dtype": "auto"}, '--dtype = "auto" is no server argument: write its own name'),
        ({"max_tokens": 1, "max-tokens": 2}, "max-tokens = 2 is there twice, also as max_tokens"),
        ({"cuda_graph_bs": [[1]]}, "cuda_graph_bs = [[1]] is no value for a server argument"),
    ],
)
def test_what_is_no_argument(table: dict[str, Any], problem: str) -> None:
    (sentence,) = check_sglang_table(table)
    assert sentence.startswith(f"[fleet.sglang] {problem}")


def test_every_fault_has_its_sentence() -> None:
    table = {"host": "0.0.0.0", "nnodes": 2, "dtype": "auto", "ssl_certfile": "x"}  # noqa: S104
    assert len(check_sglang_table(table)) == 3


def test_the_sentence_names_the_table() -> None:
    (sentence,) = check_sglang_table({"port": 1}, "[[fleet.group]] a")
    assert sentence.startswith("[[fleet.group]] a port = 1 is not allowed")
