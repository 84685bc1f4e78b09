"""The fields of the eval YAML: what miles and slime know, whoever of the two knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evald.eval_yaml.nodes import (
    Node,
    as_bool,
    as_float,
    as_int,
    as_list,
    as_mapping,
    as_text,
)

#: name -> how its value is read. The name is evald's own, too, but for those in ``RENAMED``.
FIELDS: dict[str, Callable[[Node], Any]] = {
    "name": as_text,
    "path": as_text,
    "rm_type": as_text,
    "custom_generate_function_path": as_text,
    "input_key": as_text,
    "prompt_key": as_text,
    "label_key": as_text,
    "tool_key": as_text,
    "metadata_key": as_text,
    "metadata_overrides": as_mapping,
    "n_samples_per_eval_prompt": as_int,
    "min_eval_samples": as_int,
    "temperature": as_float,
    "top_p": as_float,
    "top_k": as_int,
    "repetition_penalty": as_float,
    "max_response_len": as_int,
    "min_new_tokens": as_int,
    "stop": lambda node: as_list(node, as_text),
    "stop_token_ids": lambda node: as_list(node, as_int),
    "no_stop_trim": as_bool,
    "skip_special_tokens": as_bool,
    "apply_chat_template": as_bool,
    "apply_chat_template_kwargs": as_mapping,
}
#: the same thing in the oldest dialect.
RENAMED = {"prompt_key": "input_key"}

_STRAGGLERS = "set stragglers = 'cut' and cut_at_share or cut_after_s in [defaults] instead"
_OWN_LOOP = "it belongs to the trainer's own sampling loop, which evald does not run"
#: what is known there, and why it cannot be had here.
UNSERVED = {
    "multimodal_keys": "prompts are text here; images, video and audio are not supported",
    "custom_rm_path": (
        "its function takes the trainer's own types; write function(response, reference, "
        "metadata), and give the set as an [[eval]] table with grader = 'python'"
    ),
    "eval_task_timeout": (
        "the deadlines are [dispatch] sample_timeout_s and, in an [[eval]] table, set_deadline_s"
    ),
    "eval_early_stop_remaining": _STRAGGLERS,
    "eval_early_stop_idle_timeout": _STRAGGLERS,
    "chat_template_suffix_to_remove": (
        "prompts are rendered as the chat template says; change it with apply_chat_template_kwargs"
    ),
    "app_service": _OWN_LOOP,
    "message_processor": _OWN_LOOP,
    "reward_model": _OWN_LOOP,
    "remote_environment": _OWN_LOOP,
    "delegate": "evald asks no other evaluator; use the posture [blackbox] for that one",
}
