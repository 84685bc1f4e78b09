"""Server arguments out of their layers: who wins, what SGLang would refuse, what is shown."""

from __future__ import annotations

from typing import Any

import pytest
from settings_cases import FROM, SGLANG, names, resolve, rollout, values

from evald.engines.inherit import Setting
from evald.engines.plan import CPU_FLAGS, DEFAULT_FLAGS
from evald.engines.settings import (
    check_settings,
    command_line,
    explain,
)


@pytest.mark.parametrize(
    ("base", "inherited", "group", "override", "value", "origin"),
    [
        ("lpm", None, None, None, "lpm", "evald"),
        ("lpm", "random", None, None, "random", FROM),
        ("lpm", "random", "fcfs", None, "fcfs", "[[fleet.group]]"),
        ("lpm", "random", "lpm", "fcfs", "fcfs", "[fleet.sglang]"),
        # SGLang's default value is a value like any other.
        ("lpm", "fcfs", None, None, "fcfs", FROM),
        (None, "random", None, "fcfs", "fcfs", "[fleet.sglang]"),
    ],
)
def test_the_last_layer_wins(
    base: str | None,
    inherited: str | None,
    group: str | None,
    override: str | None,
    value: str,
    origin: str,
) -> None:
    def layer(given: str | None, name: str = "schedule-policy") -> dict[str, Any]:
        return {} if given is None else {name: given}

    resolved = resolve(
        rollout(**layer(inherited, "schedule_policy")),
        layer(override),
        group=layer(group, "schedule_policy"),
        base=layer(base),
    )
    assert resolved.settings == {"schedule_policy": Setting(value, origin)}
    assert resolved.value("schedule_policy") == value
    assert resolved.value("dtype", "auto") == "auto"


@pytest.mark.parametrize(
    ("command", "override", "words"),
    [
        ("--trust-remote-code", {}, ["--trust-remote-code"]),
        ("--trust-remote-code", {"trust_remote_code": False}, []),
        ("--enable-tf32-matmul", {"enable-tf32-matmul": False}, ["--no-enable-tf32-matmul"]),
        ("--no-enable-tf32-matmul", {"enable_tf32_matmul": True}, ["--enable-tf32-matmul"]),
        ("--enable-hicache", {"enable_hierarchical_cache": False}, []),
        ("--enable-hierarchical-cache", {"enable-hicache": False}, []),
        ("--cuda-graph-bs 1 2", {"cuda_graph_bs": []}, []),
        ("--cuda-graph-bs 1 2", {"cuda_graph_bs": [4]}, ["--cuda-graph-bs=4"]),
        ("--context-length 8k", {"context_length": "16k"}, ["--context-length=16000"]),
        ("--fp8-gemm-backend a", {"fp8_gemm_runner_backend": "b"}, ["--fp8-gemm-backend=b"]),
    ],
)
def test_spellings_are_one_field_and_booleans_can_be_turned_off(
    command: str, override: dict[str, Any], words: list[str]
) -> None:
    resolved = resolve(rollout(command), override)
    assert command_line(resolved.settings, SGLANG) == words
    assert check_settings(resolved.settings, SGLANG) == []


def test_tp_size_is_not_settable() -> None:
    assert values(resolve(None, {"tp_size": 8}, gpus=2)) == {"tp_size": 2}
    assert values(resolve(None, {"tensor-parallel-size": 8}, gpus=1)) == {}


def test_gpu_kernels_are_not_for_the_cpu() -> None:
    command = "--attention-backend fa3 --mem-fraction-static 0.8 --dtype bfloat16"
    resolved = resolve(rollout(command), base=DEFAULT_FLAGS, cpu_base=CPU_FLAGS)
    assert resolved.value("attention_backend") == "torch_native"
    assert resolved.value("dtype") == "bfloat16"
    assert names(resolved.dropped) == ["attention_backend", "mem_fraction_static"]
    # What ran on the CPU there is right for it here.
    command = "--device cpu --max-running-requests 16 --schedule-policy fcfs"
    resolved = resolve(rollout(command), base=DEFAULT_FLAGS, cpu_base=CPU_FLAGS)
    assert resolved.value("max_running_requests") == 16
    assert resolved.value("schedule_policy") == "fcfs"
    assert names(resolved.dropped) == ["device"]
    # What evald asks for on every device is no kernel.
    resolved = resolve(rollout("--schedule-policy fcfs"), base=DEFAULT_FLAGS, cpu_base=CPU_FLAGS)
    assert resolved.value("schedule_policy") == "fcfs"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            {"dtyp": "x"},
            'dtyp = "x" is no server argument of SGLang 0.5.23; did you mean dtype? If',
        ),
        (
            {"tp": 2},
            "tp = 2 is no server argument of SGLang 0.5.23; did you mean tp_size? If not, remove",
        ),
        ({"zzzz": 1}, "zzzz = 1 is no server argument of SGLang 0.5.23; remove it"),
        ({"monokernel_backend": "amd"}, 'monokernel_backend = "amd" is no server argument'),
        (
            {"mem_fraction_static": "0.8"},
            'mem_fraction_static = "0.8" must be a number (SGLang 0.5',
        ),
        ({"mem_fraction_static": True}, "mem_fraction_static = true must be a number"),
        ({"chunked_prefill_size": 1.5}, "chunked_prefill_size = 1.5 must be a whole number"),
        ({"chunked_prefill_size": True}, "chunked_prefill_size = true must be a whole number"),
        (
            {"context_length": "16kk"},
            'context_length = "16kk" must be a whole number, or text such',
        ),
        ({"trust_remote_code": "yes"}, 'trust_remote_code = "yes" must be true or false'),
        ({"enable_tf32_matmul": 1}, "enable_tf32_matmul = 1 must be true or false"),
        ({"fp8_gemm_backend": 5}, "fp8_gemm_runner_backend = 5 must be text"),
        ({"cuda_graph_bs": [1, "x"]}, "cuda_graph_bs = [1, 'x'] each item must be a whole number"),
        ({"mm_process_config": 5}, "mm_process_config = 5 must be a table or a list"),
        (
            {"schedule_policy": "lmp"},
            'schedule_policy = "lmp" must be one of "lpm", "fcfs", "random"; did you mean "lpm"? (',
        ),
        ({"dtype": 16}, 'dtype = 16 must be one of "auto", "bfloat16", "float32" ('),
        (
            {"dp_size": 2},
            "dp_size = 2 without enable_dp_attention needs 2 times the engine's 4 GPUs; raise",
        ),
        (
            {"dp_size": 3, "enable_dp_attention": True},
            "dp_size = 3 must divide the engine's 4 GPUs (gpus_per_engine)",
        ),
        ({"attn_cp_size": 3}, "attn_cp_size = 3 must divide the engine's 4 GPUs"),
    ],
)
def test_a_value_that_sglang_would_not_take(override: dict[str, Any], sentence: str) -> None:
    (problem,) = check_settings(resolve(None, override, gpus=4).settings, SGLANG)
    assert problem.startswith(f"[fleet.sglang] {sentence}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"mem_fraction_static": 1}, ["--mem-fraction-static=1"]),
        ({"context_length": 4096}, ["--context-length=4096"]),
        ({"model_checksum": True}, ["--model-checksum"]),
        ({"model_checksum": "/s"}, ["--model-checksum=/s"]),
        ({"json_model_override_args": {"a": 1}}, ['--json-model-override-args={"a": 1}']),
        ({"mm_process_config": [{"a": 1}, 2]}, ['--mm-process-config=[{"a": 1}, 2]']),
        ({"cuda_graph_bs": 4}, ["--cuda-graph-bs=4"]),
        ({"cuda_graph_bs": [1, 2]}, ["--cuda-graph-bs", "1", "2"]),
        ({"chunked_prefill_size": -1}, ["--chunked-prefill-size=-1"]),
        ({"dp_size": 4, "enable_dp_attention": True}, ["--dp-size=4", "--enable-dp-attention"]),
    ],
)
def test_a_value_that_sglang_takes(override: dict[str, Any], words: list[str]) -> None:
    resolved = resolve(None, override, gpus=4)
    assert check_settings(resolved.settings, SGLANG) == []
    assert command_line(resolved.settings, SGLANG) == [*words, "--tp-size=4"]


def test_without_asking_sglang_names_only_get_their_underscores() -> None:
    override = {"mem-fraction-static": 0.8, "trust_remote_code": True, "new_flag": False}
    resolved = resolve(None, override, base=DEFAULT_FLAGS, gpus=2, arguments=None)
    assert command_line(resolved.settings, None) == [
        *("--schedule-policy=lpm", "--enable-metrics", "--log-level-http=warning"),
        *("--mem-fraction-static=0.8", "--trust-remote-code", "--tp-size=2"),
    ]


def test_keys_are_shown_to_nobody() -> None:
    inherited = rollout("--api-key s3cret --json-model-override-args '{}'")
    text = "\n".join(explain(resolve(inherited)))
    assert "s3cret" not in text
    assert "not inherited: api_key = (hidden): " in text
    assert 'json_model_override_args = "{}"  (from [fleet.inherit] command)' in text


def test_long_values_are_shortened() -> None:
    (line,) = explain(resolve(rollout(json_model_override_args="x" * 200)))
    assert len(line) < 180
    assert "...  (from" in line
