"""Server arguments of the rollout engines: what is taken over, what is not, what is resized."""

from __future__ import annotations

from typing import Any

import pytest
from settings_cases import SGLANG, names, resolve, rollout, values

from evald.config import Inherit
from evald.engines.inherit import Inherited, read_inherited
from evald.engines.inherit_table import NEEDS_WIDTH, WIDTHS, why_not_inherited
from evald.engines.plan import DEFAULT_FLAGS
from evald.engines.settings import (
    check_settings,
    command_line,
    explain,
)
from evald.engines.sglang_table import EXCEPT, ONLY, RESERVED


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("--model-path /m", "engines boot on [fleet] model"),
        ("--host 0.0.0.0", "engines listen on the loopback interface only"),
        ("--port 30000", "evald takes a fresh port for each launch"),
        ("--nccl-port 30000", "evald takes fresh ports, and two engines cannot share one"),
        ("--api-key k", "evald makes a new API key for each launch"),
        ("--served-model-name m", "SGLang changes it with every load"),
        ("--weight-version 7", "evald proves by it that the server behind the port is its own"),
        ("--nnodes 2", "an engine lives on this node alone"),
        ("--node-rank 0", "an engine lives on this node alone"),
        ("--dist-init-addr a:1", "an engine lives on this node alone"),
        ("--base-gpu-id 4", "evald gives each engine its GPUs"),
        ("--tp-size 1", "it comes from [fleet] gpus_per_engine"),
        ("--enable-memory-saver", "only engines that share their GPUs with a trainer"),
        ("--load-format dummy", "random weights prove nothing"),
        ("--load-format gguf", "engines boot from the files of [fleet] model"),
        ("--skip-tokenizer-init", "evald needs the server's own text of each answer"),
        ("--enable-return-routed-experts", "only training reads it"),
        ("--speculative-algorithm EAGLE", "the trainer's draft of another step"),
        ("--speculative-draft-model-path /d", "the trainer's draft of another step"),
        ("--hicache-storage-backend file", "KV of earlier weights would survive a pin"),
        ("--delete-ckpt-after-loading", "SGLang would delete the files of the base model"),
        ("--lora-paths a=/a", "an adapter of another step"),
        ("--chat-template /t.jinja", "evald applies the chat template itself"),
        ("--enable-metrics", "evald reads the engines' metrics"),
        ("--model-checksum /sums", "it names the sums of the rollout engine's model"),
    ],
)
def test_never_inherited(command: str, reason: str) -> None:
    resolved = resolve(rollout(command))
    assert resolved.settings == {}
    (gone,) = resolved.dropped
    assert gone.reason.startswith(reason)
    (line,) = explain(resolved)
    assert line.startswith(f"not inherited: {gone.name} = ")
    assert line.endswith(gone.reason)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "checkpoint_engine_wait_weights_before_ready",
            "gated_launch_port",
            "disaggregation_mode",
        ),
        *(
            "encoder_only",
            "enable_return_indexer_topk",
            "crash_dump_folder",
            "otlp_traces_endpoint",
        ),
        *("speculative_some_later_option", "weight_cache_mode", "preferred_sampling_params"),
        *("ssl_keyfile", "admin_api_key", "tokenizer_path", "kt_weight_path", "enable_lmcache"),
    ],
)
def test_more_that_is_never_inherited(name: str) -> None:
    assert why_not_inherited(name, True)


def test_all_that_may_not_stand_here_is_not_inherited_either() -> None:
    for option in [*RESERVED, *ONLY, *EXCEPT]:
        refused = EXCEPT[option][0][0] if option in EXCEPT else "something else"
        assert why_not_inherited(option.replace("-", "_"), refused)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dtype", "bfloat16"), ("mem_fraction_static", 0.7), ("attention_backend", "fa3")),
        *(("load_format", "safetensors"), ("skip_tokenizer_init", False), ("quantization", "fp8")),
        *(("enable_hierarchical_cache", True), ("json_model_override_args", "{}")),
    ],
)
def test_what_the_user_tuned_is_inherited(name: str, value: Any) -> None:
    assert values(resolve(rollout(**{name: value}))) == {name: value}


def test_what_is_never_inherited_may_be_set_here() -> None:
    resolved = resolve(rollout("--speculative-algorithm EAGLE"), {"speculative_algorithm": "NGRAM"})
    assert values(resolved) == {"speculative_algorithm": "NGRAM"}


def test_without_leaves_out_more() -> None:
    inherited = rollout("--attention-backend fa3 --not-yet-known 3 --dtype auto")
    inherited = Inherited(
        settings=inherited.settings, without=["attention-backend", "not-yet-known", "dtyp"]
    )
    resolved = resolve(inherited)
    assert values(resolved) == {"dtype": "auto"}
    assert names(resolved.dropped) == ["attention_backend", "not_yet_known"]
    assert resolved.notes == ["fleet.inherit.without: dtyp is not among the inherited arguments"]


SIZED: dict[str, Any] = {
    "dp_size": 8,
    "attn_dp_size": 2,
    "moe_dp_size": 2,
    "ep_size": 8,
    "attn_cp_size": 2,
}


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_another_tp_size_resets_what_was_sized_for_it(name: str, gpus: int) -> None:
    resolved = resolve(rollout("--tp 8", **{name: SIZED[name]}), gpus=gpus)
    assert values(resolved) == ({"tp_size": gpus} if gpus > 1 else {})
    (gone,) = resolved.reset
    assert gone.name == name
    assert gone.reason == f"sized for tp_size 8, and these engines have {gpus}"


@pytest.mark.parametrize("layer", ["group", "override"])
def test_a_width_that_is_set_here_stays(layer: str) -> None:
    layers: dict[str, Any] = {layer: {"expert-parallel-size": 2}}
    resolved = resolve(rollout(tp_size=8, ep_size=8), gpus=4, **layers)
    assert values(resolved) == {"ep_size": 2, "tp_size": 4}
    assert resolved.reset == []


@pytest.mark.parametrize(
    ("given", "override", "kept"),
    [
        ({"enable_dp_attention": True}, {}, {}),
        ({"enable_dp_attention": True}, {"ep_size": 4}, {"ep_size": 4}),
        (
            {"enable_dp_attention": True, "enable_dp_lm_head": True, "dp_size": 8},
            {"dp_size": 4},
            {"enable_dp_attention": True, "enable_dp_lm_head": True, "dp_size": 4},
        ),
        ({"enable_dp_lm_head": True}, {"attn_dp_size": 2}, None),
        ({"enable_eplb": True, "ep_num_redundant_experts": 8}, {}, {}),
        ({"eplb_algorithm": "auto", "deepep_mode": "auto"}, {}, {}),
        ({"enable_eplb": True}, {"ep_size": 4}, {"enable_eplb": True, "ep_size": 4}),
        ({"enable_eplb": True}, {"enable_eplb": True}, {"enable_eplb": True}),
    ],
)
def test_what_needs_a_width_goes_with_it(
    given: dict[str, Any], override: dict[str, Any], kept: dict[str, Any] | None
) -> None:
    resolved = resolve(rollout(tp_size=8, **given), override, gpus=4)
    assert values(resolved) == {**(given | override if kept is None else kept), "tp_size": 4}


def test_the_same_tp_size_keeps_the_layout() -> None:
    command = "--tp 8 --ep 8 --dp-size 8 --enable-dp-attention --enable-dp-lm-head --enable-eplb"
    resolved = resolve(rollout(command), gpus=8)
    assert resolved.reset == []
    assert values(resolved) == {
        "ep_size": 8,
        "dp_size": 8,
        "enable_dp_attention": True,
        "enable_dp_lm_head": True,
        "enable_eplb": True,
        "tp_size": 8,
    }
    assert check_settings(resolved.settings, SGLANG) == []


def test_replicas_need_more_gpus_than_an_engine_has() -> None:
    resolved = resolve(rollout("--tp 4 --dp-size 2 --ep 4"), gpus=4)
    assert values(resolved) == {"ep_size": 4, "tp_size": 4}
    (gone,) = resolved.reset
    assert gone.reason == "without enable_dp_attention it needs 2 times the GPUs of an engine"
    kept = resolve(rollout("--tp 4 --dp-size 2"), {"enable_dp_attention": True}, gpus=4)
    assert kept.value("dp_size") == 2


@pytest.mark.parametrize("gpus", [4, 8])
def test_pipeline_stages_are_not_inherited(gpus: int) -> None:
    resolved = resolve(rollout("--tp 4 --pp-size 2"), gpus=gpus)
    assert values(resolved) == {"tp_size": gpus}
    assert names(resolved.dropped) == ["tp_size", "pp_size"]


def test_a_rollout_without_tp_size_had_one() -> None:
    assert names(resolve(rollout(ep_size=2), gpus=4).reset) == ["ep_size"]
    assert resolve(rollout(ep_size=1), gpus=1).reset == []


def test_an_unknown_inherited_argument_can_be_left_out() -> None:
    resolved = resolve(rollout("--not-yet-known 3"))
    (problem,) = check_settings(resolved.settings, SGLANG)
    assert problem == (
        '[fleet.inherit] command not_yet_known = "3" is no server argument of SGLang 0.5.23; '
        "name it in fleet.inherit.without to leave it out"
    )


def test_every_width_and_need_is_one_that_could_be_inherited() -> None:
    for name in [*WIDTHS, *NEEDS_WIDTH]:
        assert not why_not_inherited(name, 2), name


ROLLOUT = """
NCCL_CUMEM_ENABLE=0 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
python3 -m sglang.launch_server --model-path /ckpt/rollout --host 0.0.0.0 --port 30000 \\
  --nccl-port 31000 --trust-remote-code --tp 8 --ep 8 --enable-dp-attention --dp-size 8 \\
  --enable-dp-lm-head --moe-a2a-backend deepep --enable-eplb --ep-num-redundant-experts 16 \\
  --mem-fraction-static 0.7 --context-length 32k --chunked-prefill-size 16384 \\
  --attention-backend fa3 --cuda-graph-bs 1 2 4 8 --max-running-requests 256 \\
  --json-model-override-args '{"rope_scaling": {"factor": 4}}' --load-format dummy \\
  --enable-memory-saver --skip-tokenizer-init --enable-return-routed-experts --api-key s3cret \\
  --speculative-algorithm EAGLE --speculative-draft-model-path /ckpt/draft \\
  --hicache-storage-backend file --weight-version 17 --served-model-name policy > log 2>&1 &
"""


def test_a_four_gpu_node_out_of_an_eight_gpu_rollout() -> None:
    inherited = read_inherited(Inherit(command=ROLLOUT), base=None, arguments=SGLANG, environ={})
    override = {"mem_fraction_static": 0.85, "trust_remote_code": False}
    resolved = resolve(inherited, override, gpus=4, base=DEFAULT_FLAGS)
    assert check_settings(resolved.settings, SGLANG) == []
    assert command_line(resolved.settings, SGLANG) == [
        *("--schedule-policy=lpm", "--enable-metrics", "--log-level-http=warning"),
        *("--mem-fraction-static=0.85", "--context-length=32000", "--chunked-prefill-size=16384"),
        *("--attention-backend=fa3", "--cuda-graph-bs", "1", "2", "4", "8"),
        *("--max-running-requests=256",),
        *('--json-model-override-args={"rope_scaling": {"factor": 4}}', "--tp-size=4"),
    ]
    assert sorted(names(resolved.dropped)) == [
        *("api_key", "enable_memory_saver", "enable_return_routed_experts"),
        *("hicache_storage_backend", "host", "load_format", "model_path", "nccl_port", "port"),
        *("served_model_name", "skip_tokenizer_init", "speculative_algorithm"),
        *("speculative_draft_model_path", "tp_size", "weight_version"),
    ]
    assert sorted(names(resolved.reset)) == [
        *("dp_size", "enable_dp_attention", "enable_dp_lm_head", "enable_eplb"),
        *("ep_num_redundant_experts", "ep_size", "moe_a2a_backend"),
    ]
    lines = explain(resolved)
    assert "tp_size = 4  (from [fleet] gpus_per_engine)" in lines
    assert "mem_fraction_static = 0.85  (from [fleet.sglang])" in lines
    assert "context_length = 32000  (from [fleet.inherit] command)" in lines
    assert "reset: ep_size = 8: sized for tp_size 8, and these engines have 4" in lines
    assert lines[-1].startswith("[fleet.inherit] command: environment is not inherited: NCCL_CUMEM")
    assert len(lines) == len(resolved.settings) + len(resolved.dropped) + len(resolved.reset) + 1
