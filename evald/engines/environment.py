"""What the processes that evald starts may see of its own environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def engine_env(fleet: Fleet, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``environ`` that engines may see, and what SGLang needs beside it."""
    is_cpu = fleet.device == "cpu"
    env = _ENGINE_ENV | (_CPU_ENV if is_cpu else {}) | inherited_env(environ, fleet.pass_env)
    if is_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    return env
