"""What is not taken over from the rollout engines, each with its reason.

Names are SGLang's field names; ``*`` stands for the rest of a name, so that a family is covered in
versions that have more of it. What [fleet.sglang] may not hold (``sglang_table``) is not taken
over either, for the reason given there.
"""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from evald.engines.sglang_table import EXCEPT, ONLY, RESERVED

Entry = TypeVar("Entry")

_STALE_DRAFT = "the trainer's draft of another step; it is not part of a snapshot"
_STALE_KV = "KV of earlier weights would survive a pin there"
_PORT = "evald takes fresh ports, and two engines cannot share one"
_LOADS = "engines boot from the files of [fleet] model and are pinned from disk"
_LOGS = "it writes where the rollout engine logs; evald keeps the engines' logs itself"
_LISTENER = "it reports to a listener or proxy of the rollout engines"
_TRAINING = "only training reads it, and every answer would carry it"
_TEMPLATE = "evald applies the chat template itself"
_SILENT = "it would change what is measured without a word"
_MEMORY = "only engines that share their GPUs with a trainer give memory back"
_DISAGGREGATION = "evald needs servers that prefill and decode themselves"
_NOT_OURS = "the process that it works with belongs to the rollout engines"
_ADAPTER = "an adapter of another step is no part of a snapshot"

#: names or patterns -> reason.
NEVER_INHERITED: dict[str, str] = {
    # What evald decides by itself; the rest of it is in sglang_table.
    **{name.replace("-", "_"): reason for name, reason in RESERVED.items()},
    "model_path": "engines boot on [fleet] model",
    "device": "[fleet] device decides",
    "tp_size": "it comes from [fleet] gpus_per_engine",
    "pp_size": "all GPUs of an engine are tensor parallel",
    "pp_*": "it goes with pp_size, which is 1",
    "served_model_name": "SGLang changes it with every load, and evald does not use it",
    "tokenizer_path": "the tokenizer is the one of [fleet] model",
    "revision": "[fleet] model is a local directory",
    "enable_metrics": "evald reads the engines' metrics and asks for them itself",
    "skip_server_warmup": "evald sends nothing before an engine has warmed up",
    "warmups": "it names functions for the rollout engines' requests",
    "numa_node": "it lists the processors of another machine's GPUs",
    "enable_http_worker_reuseport": "it goes with several HTTP workers, and those take no API key",
    "enable_ssl_refresh": "evald speaks plain HTTP to its engines, over the loopback interface",
    "enable_http2": "evald speaks HTTP/1.1, and this needs another server package",
    "http2_*": "evald speaks HTTP/1.1",
    # Ports, listeners, processes and directories of the rollout engines.
    "*_port": _PORT,
    "*_ports": _PORT,
    "sidecar*": _NOT_OURS,
    "weight_cache_*": _NOT_OURS,
    "elastic_ep_*": _NOT_OURS,
    "enable_elastic_expert_backup": _NOT_OURS,
    "ep_join_*": _NOT_OURS,
    "max_ep_size": _NOT_OURS,
    "fastapi_root_path": _LISTENER,
    "tool_server": _LISTENER,
    "kv_events_config": _LISTENER,
    "load_publish_endpoint": _LISTENER,
    "enable_forward_pass_metrics": _LISTENER,
    "forward_pass_metrics_*": _LISTENER,
    "enable_trace": _LISTENER,
    "trace_modules": _LISTENER,
    "otlp_*": _LISTENER,
    "log_level": _LOGS,
    "log_level_http": _LOGS,
    "log_requests*": _LOGS,
    "uvicorn_access_log_*": _LOGS,
    "crash_dump_folder": _LOGS,
    "export_metrics_to_file*": _LOGS,
    "spec_trace_dir": _LOGS,
    "debug_tensor_dump_*": _LOGS,
    "msprobe_dump_config": _LOGS,
    "file_storage_path": _LOGS,
    "enable_response_store": "answers would be kept without limit",
    # Weights: how they come in, and what would stay behind after a pin.
    "custom_weight_loader": _LOADS,
    "remote_instance_weight_loader_*": _LOADS,
    "modelexpress_config": _LOADS,
    "rl_quant_profile": _LOADS,
    "download_dir": _LOADS,
    "model_checksum": "it names the sums of the rollout engine's model",
    "decrypted_*": _LOADS,
    "modelopt_checkpoint_*": "it names files of the rollout engine's model",
    "modelopt_export_path": "it writes files beside the rollout engine's model",
    "delete_ckpt_after_loading": "SGLang would delete the files of the base model or a snapshot",
    "enable_memory_saver": _MEMORY,
    "enable_weights_cpu_backup": _MEMORY,
    "enable_draft_weights_cpu_backup": _MEMORY,
    "kt_*": "experts that it reads from files of its own are not replaced by a pin",
    "ple_offload_dir": "embeddings of earlier weights would survive a pin there",
    "speculative_*": _STALE_DRAFT,
    "decoupled_spec_*": _STALE_DRAFT,
    "enable_multi_layer_eagle": _STALE_DRAFT,
    "uno_lora_path": _STALE_DRAFT,
    "enable_lora": _ADAPTER,
    "enable_lora_overlap_loading": _ADAPTER,
    "lora_*": _ADAPTER,
    "max_lora_*": _ADAPTER,
    "max_loras_per_batch": _ADAPTER,
    "max_loaded_loras": _ADAPTER,
    "experts_shared_outer_loras": _ADAPTER,
    "hicache_storage_*": _STALE_KV,
    "enable_unified_cache_external_linker": _STALE_KV,
    "unified_cache_external_linker_*": _STALE_KV,
    "enable_linker_mla_dedup": _STALE_KV,
    "enable_lmcache": _STALE_KV,
    "lmcache_config_file": _STALE_KV,
    "enable_flexkv": _STALE_KV,
    "flexkv_config_file": _STALE_KV,
    "radix_cache_backend": _STALE_KV,
    "enable_mm_global_cache": _STALE_KV,
    "mm_global_cache_backend": _STALE_KV,
    # Roles, answers and prompts.
    "disaggregation_*": _DISAGGREGATION,
    "num_reserved_decode_tokens": _DISAGGREGATION,
    "optimistic_prefill_attempts": _DISAGGREGATION,
    "enable_pd_role_switch": _DISAGGREGATION,
    "language_only": _DISAGGREGATION,
    "encoder_*": _DISAGGREGATION,
    "enable_adaptive_dispatch_to_encoder": _DISAGGREGATION,
    "enable_return_routed_experts": _TRAINING,
    "enable_return_indexer_topk": _TRAINING,
    "enable_return_hidden_states": _TRAINING,
    "return_hidden_states_mode": _TRAINING,
    "enable_return_aux_hidden_states": _TRAINING,
    "return_aux_hidden_state_layer_ids": _TRAINING,
    "return_input_ids": _TRAINING,
    "return_output_ids": _TRAINING,
    "chat_template": _TEMPLATE,
    "hf_chat_template_name": _TEMPLATE,
    "default_chat_template_kwargs": _TEMPLATE,
    "completion_template": _TEMPLATE,
    "preferred_sampling_params": _SILENT,
    "allow_auto_truncate": _SILENT,
    "enable_watermark": _SILENT,
    "watermark_config": _SILENT,
    "forward_hooks": _SILENT,
}  # fmt: skip

#: load formats that read the files of a plain Hugging Face directory.
_LOAD_FORMATS = ("auto", "safetensors")

_GPU_KERNEL = "it was chosen for GPUs, and [fleet] device is 'cpu'"
#: not taken over from GPU engines by engines on the CPU.
NOT_ON_CPU = (
    "*attention_backend",
    "*_gemm_*backend",
    "moe_*_backend",
    "*mamba_backend",
    "linear_attn_*",
    "dsa_*",
    "dsv4_*",
    "cuda_graph_*",
    "disable_cuda_graph*",
    "disable_*_cuda_graph",
    "enable_torch_compile",
    "enable_nccl_nvls",
    "enable_symm_mem",
    "enable_torch_symm_mem",
    "enable_mscclpp",
    "*allreduce_fusion*",
    "triton_*",
    "flashinfer_*",
    "quantization",
    "kv_cache_dtype",
    "mem_fraction_static",
    "enable_deterministic_inference",
    "rl_on_policy_target",
)

#: numbers of ranks that are sized for one tensor parallel size; 1 is SGLang's own value.
WIDTHS = (
    "dp_size",
    "attn_dp_size",
    "ep_size",
    "attn_cp_size",
    "moe_dp_size",
    "dcp_size",
    "dwdp_size",
    "moe_dense_tp_size",
    "shared_experts_tp_size",
)
_DP = ("dp_size", "attn_dp_size")
_EP = ("ep_size",)
_CP = ("attn_cp_size",)
#: names or patterns -> widths without which they mean nothing, or stop SGLang at its start.
NEEDS_WIDTH: dict[str, tuple[str, ...]] = {
    "enable_dp_attention": _DP,
    "enable_dp_attention_local_control_broadcast": _DP,
    "enable_dp_lm_head": _DP,
    "enable_tp_lm_head_all_to_all": _DP,
    "enable_prefill_delayer": _DP,
    "prefill_delayer_*": _DP,
    "load_balance_method": _DP,
    "moe_a2a_backend": _EP,
    "deepep_*": _EP,
    "fuseep_mode": _EP,
    "enable_w4a4_mxfp4_megamoe": _EP,
    "ep_num_redundant_experts": _EP,
    "ep_dispatch_algorithm": _EP,
    "init_expert_location": _EP,
    "enable_eplb": _EP,
    "eplb_*": _EP,
    "expert_distribution_recorder_*": _EP,
    "expert_balancedness_report_mode": _EP,
    "enable_waterfill": _EP,
    "mooncake_ib_device": _EP,
    "enable_two_batch_overlap": _EP,
    "enable_single_batch_overlap": _EP,
    "tbo_token_distribution_threshold": _EP,
    "enable_prefill_cp": _CP,
    "cp_strategy": _CP,
    "enable_dsa_cache_layer_split": _CP,
    "enable_cp_decode_attn_tp": _CP,
    "enable_kv_cache_sharding": _CP,
    "dcp_comm_backend": ("dcp_size",),
    "dcp_replicate_q_proj": ("dcp_size",),
}


def why_not_inherited(name: str, value: Any) -> str | None:
    """Return why a field is not taken over with this value; None if it is."""
    if reason := lookup(NEVER_INHERITED, name):
        return reason
    option = name.replace("_", "-")
    if option in ONLY and value not in ONLY[option][0]:
        return ONLY[option][1]
    if option in EXCEPT and value in EXCEPT[option][0]:
        return EXCEPT[option][1]
    if name == "load_format" and value not in _LOAD_FORMATS:
        return _LOADS
    return None


def why_not_on_cpu(name: str, own: Container[str]) -> str | None:
    """Return why engines on the CPU do not take a field over from GPU engines.

    ``own``: fields that evald sets itself for engines on the CPU.
    """
    chosen_for_gpus = name in own or any(fnmatchcase(name, pattern) for pattern in NOT_ON_CPU)
    return _GPU_KERNEL if chosen_for_gpus else None


def lookup(table: dict[str, Entry], name: str) -> Entry | None:
    """Return the entry of a name, or of the first pattern that it matches."""
    if name in table:
        return table[name]
    return next((entry for key, entry in table.items() if fnmatchcase(name, key)), None)
