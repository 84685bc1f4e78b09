"""A parser with one server argument of each kind that SGLang has, and its description."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from evald.engines.argument import Argument, ServerArguments
from evald.engines.ask_sglang import describe


class DeprecatedStoreConstAction(argparse.Action):
    """As SGLang's class of this name: an old spelling that stores one value."""

    def __init__(self, *args: Any, const_value: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.const_value = const_value

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        del parser, values, option
        setattr(namespace, self.dest, self.const_value)


def human_readable_int(word: str) -> int:
    return int(word)


def small_parser() -> argparse.ArgumentParser:  # noqa: PLR0915 - a list, one line for each
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--model-path", "--model")
    add("--host")
    add("--port", type=int, default=30000)
    add("--nccl-port", type=int)
    add("--device")
    add("--api-key")
    add("--config")
    add("--weight-version", default="default")
    add("--served-model-name")
    add("--chat-template")
    add("--tp-size", "--tensor-parallel-size", type=int, default=1)
    add("--pp-size", "--pipeline-parallel-size", type=int, default=1)
    add("--dp-size", "--data-parallel-size", type=int, default=1)
    add("--attn-dp-size", type=int, default=1)
    add("--attn-cp-size", type=int, default=1)
    add("--ep-size", "--expert-parallel-size", "--ep", type=int, default=1)
    add("--ep-num-redundant-experts", type=int, default=0)
    add("--moe-a2a-backend", choices=["none", "deepep"], default="none")
    add("--enable-eplb", action="store_true")
    add("--enable-dp-lm-head", action="store_true")
    add("--enable-dp-attention", action="store_true")
    add("--nnodes", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--dist-init-addr", "--nccl-init-addr")
    add("--base-gpu-id", type=int, default=0)
    add("--context-length", type=human_readable_int)
    add("--mem-fraction-static", type=float)
    add("--chunked-prefill-size", type=int)
    add("--max-running-requests", type=int)
    add("--schedule-policy", choices=["lpm", "fcfs", "random"], default="fcfs")
    add("--load-format", choices=["auto", "safetensors", "dummy", "gguf"], default="auto")
    add("--dtype", choices={"auto", "bfloat16", "float32"}, default="auto")
    add("--attention-backend", choices=["fa3", "torch_native"])
    add("--json-model-override-args", default="{}")
    add("--mm-process-config", type=json.loads)
    add("--cuda-graph-bs", type=int, nargs="+")
    add("--lora-paths", nargs="*")
    add("--model-checksum", nargs="?", const="")
    add("--fp8-gemm-backend", dest="fp8_gemm_runner_backend")
    add("--trust-remote-code", action="store_true")
    add("--log-level-http")
    add("--enable-metrics", action="store_true")
    add("--skip-tokenizer-init", action="store_true")
    add("--enable-memory-saver", action="store_true")
    add("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
    add("--hicache-storage-backend")
    add("--speculative-algorithm")
    add("--speculative-draft-model-path")
    add("--enable-return-routed-experts", action="store_true")
    add("--delete-ckpt-after-loading", action="store_true")
    add("--enable-tf32-matmul", action=argparse.BooleanOptionalAction)
    add("--enable-amd-monokernel", action="store_true")
    add(
        "--monokernel-backend",
        action=DeprecatedStoreConstAction,
        const_value=True,
        dest="enable_amd_monokernel",
        choices=["amd"],
    )
    return parser


def small_sglang() -> ServerArguments:
    described = describe(small_parser())
    return ServerArguments(version="0.5.23", arguments=msgspec.convert(described, list[Argument]))
