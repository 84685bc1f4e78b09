"""What the processes that evald starts may see of its own environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from evald.config import Fleet

#: variables that are passed on; beside them, those that a table's pass_env names.
_INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CC", "CXX", "VIRTUAL_ENV", "CONDA_PREFIX",
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
})  # fmt: skip
_INHERITED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "UCX_", "GLOO_", "SGLANG_", "SGL_", "TRITON_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "FLASHINFER_", "OMP_", "MKL_", "KMP_",
)  # fmt: skip
#: parts of a name that mark a secret: such a variable is passed only when pass_env names it.
_SECRET_PARTS = frozenset({"KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS"})

#: the launcher dies at once when one of its processes has failed, not up to a minute later.
_ENGINE_ENV = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
#: where SGLang and what it builds on keep compiled kernels, below systemd's CacheDirectory=: making
#: them again takes over a minute of each first start. (FlashInfer adds .cache/flashinfer itself.)
_CACHES = {
    "XDG_CACHE_HOME": "",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "",
    "CUDA_CACHE_PATH": "nv",
}
#: the plugin that evald puts into SGLang: its folder, and its name there.
PLUGIN_DIR = Path(__file__).parents[1] / "engine_plugin"
PLUGIN = "evald_fast_load"
_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def inherited_env(environ: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Return the part of ``environ`` that is passed on: what is listed above or in ``pass_env``."""
    env = {}
    for name, value in environ.items():
        known = name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        secret = not _SECRET_PARTS.isdisjoint(name.split("_"))
        if (known and not secret) or name in pass_env:
            env[name] = value
    return env


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the directory that systemd keeps for the service's caches; None: there is none."""
    first = environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    return Path(first) if first else None


def cache_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where kernels are kept, unless ``environ`` says it; {}: at each one's own place."""
    directory = cache_directory(environ)
    if directory is None:
        return {}
    return {name: environ.get(name) or str(directory / below) for name, below in _CACHES.items()}


def engine_env(fleet: Fleet, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``environ`` that engines may see, and what SGLang needs beside it."""
    is_cpu = fleet.device == "cpu"
    env = _ENGINE_ENV | (_CPU_ENV if is_cpu else {}) | cache_env(environ)
    env |= inherited_env(environ, fleet.pass_env)
    if is_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if fleet.fast_pin == "on" or not is_cpu:
        # what it says of the GPU's memory is wanted whoever loads
        path = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{PLUGIN_DIR}{os.pathsep}{path}" if path else str(PLUGIN_DIR)
        if env.get("SGLANG_PLUGINS"):  # a list of those that are allowed
            env["SGLANG_PLUGINS"] += f",{PLUGIN}"
    return env
