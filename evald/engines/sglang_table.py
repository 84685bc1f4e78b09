"""The [fleet.sglang] table: what may be in it, and why some server arguments may not."""

from __future__ import annotations

import re
from typing import Any

_FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

_ONE_NODE = "an engine lives on this node alone"
_GPUS = "evald gives each engine its GPUs; set [fleet] gpus, engines or gpus_per_engine"
_HTTP = "evald speaks plain HTTP to its engines, over the loopback interface"
_KEY = "evald makes a new API key for each launch"

#: never allowed, whatever the value.
RESERVED = {
    "model-path": "set [fleet] model",
    "model": "set [fleet] model",
    "device": "set [fleet] device",
    "host": "engines listen on the loopback interface only",
    "port": "evald takes a fresh port for each launch",
    "config": "evald hands over its own file, with the API key in it",
    "api-key": _KEY,
    "admin-api-key": _KEY,
    "weight-version": "evald proves by it that the server behind the port is its own",
    "tp-size": _GPUS,
    "tensor-parallel-size": _GPUS,
    "pp-size": _GPUS,
    "pipeline-parallel-size": _GPUS,
    "base-gpu-id": _GPUS,
    "gpu-id-step": _GPUS,
    "nnodes": _ONE_NODE,
    "node-rank": _ONE_NODE,
    "dist-init-addr": _ONE_NODE,
    "nccl-init-addr": _ONE_NODE,
    "ssl-keyfile": _HTTP,
    "ssl-certfile": _HTTP,
    "ssl-ca-certs": _HTTP,
    "ssl-keyfile-password": _HTTP,
}
#: allowed with these values only (the ones that change nothing).
ONLY = {
    "skip-tokenizer-init": ((False,), "evald needs the server's own text of each answer"),
    "tokenizer-worker-num": ((1,), "SGLang takes no API key with more tokenizer workers"),
    "is-embedding": ((False,), "evald needs a server that generates"),
    "encoder-only": ((False,), "evald needs a server that generates"),
    "disaggregation-mode": (("null",), "evald needs servers that prefill and decode themselves"),
    "use-ray": ((False,), "evald starts and stops the engine's processes itself"),
    "grpc-mode": ((False,), _HTTP),
    "smg-grpc-mode": ((False,), _HTTP),
    "checkpoint-engine-wait-weights-before-ready": (
        (False,),
        "the engine boots on [fleet] model and is pinned later",
    ),
}
#: allowed with any value but these.
EXCEPT = {
    "load-format": (("dummy",), "random weights prove nothing; the engine boots on [fleet] model"),
}


def flag_name(key: str) -> str:
    """Return the command line spelling of a key: ``mem_fraction_static`` has dashes there."""
    return key.replace("_", "-")


def check_sglang_table(table: dict[str, Any], where: str = "[fleet.sglang]") -> list[str]:
    """Return one sentence for each entry that cannot be used; which flags exist SGLang knows.

    ``where``: the table's name in the config, for the sentences.
    """
    problems: list[str] = []
    seen: dict[str, str] = {}
    for key, value in table.items():
        name = flag_name(key)
        shown = f"{where} {key} = {_toml(value)}"
        if not _FLAG_NAME.fullmatch(name):
            problems.append(
                f"{shown} is no server argument: write its own name, "
                "such as mem_fraction_static or mem-fraction-static"
            )
        elif name in seen:
            problems.append(f"{shown} is there twice, also as {seen[name]}; keep one")
        elif reason := _why_not(name, value):
            problems.append(f"{shown} is not allowed: {reason}; remove it")
        elif not _is_usable(value):
            problems.append(
                f"{shown} is no value for a server argument: allowed are text, numbers, true, "
                "false, lists of these, and a table (passed as JSON)"
            )
        seen.setdefault(name, key)
    return problems


def _why_not(name: str, value: Any) -> str | None:
    if name in RESERVED:
        return RESERVED[name]
    if name in ONLY:
        allowed, reason = ONLY[name]
        return None if value in allowed else reason
    if name in EXCEPT:
        refused, reason = EXCEPT[name]
        return reason if value in refused else None
    # SGLang's parser takes unambiguous beginnings: "--api k" would be "--api-key k".
    for reserved, reason in RESERVED.items():
        if reserved.startswith(name):
            return f"it could stand for {reserved.replace('-', '_')}, and {reason}"
    return None


def _is_usable(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str | int | float) for item in value)
    return isinstance(value, str | int | float | dict)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
