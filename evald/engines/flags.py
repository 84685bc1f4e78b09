"""The command line and environment of one engine."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from evald.config import Fleet
from evald.engines.sglang_table import check_sglang_table, flag_name
from evald.errors import ConfigError

CPU_LAUNCHER = Path(__file__).parent / "cpu_mode" / "launch.py"

__all__ = [
    "LaunchCommand",
    "check_sglang_table",
    "default_max_requests",
    "engine_env",
    "gpus_for",
    "launch_command",
]

#: what evald asks for unless [fleet.sglang] says otherwise.
DEFAULT_FLAGS: dict[str, Any] = {
    # fcfs, SGLang's own default, gains nothing from prompts that share a prefix.
    "schedule-policy": "lpm",
    "enable-metrics": True,
    # One access line for each request would be most of the log.
    "log-level-http": "warning",
}
#: a server on a machine without a GPU, tried and measured; an idle one sleeps.
CPU_FLAGS: dict[str, Any] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "max-total-tokens": 65536,
    "max-running-requests": 128,
    "sleep-on-idle": True,
}
#: requests in flight that keep a GPU engine busy when no limit is configured.
GPU_MAX_REQUESTS = 256

#: variables that engines inherit; beside them, [fleet] pass_env.
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CC", "CXX", "VIRTUAL_ENV", "CONDA_PREFIX",
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
})  # fmt: skip
INHERITED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "UCX_", "GLOO_", "SGLANG_", "SGL_", "TRITON_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "FLASHINFER_", "OMP_", "MKL_", "KMP_",
)  # fmt: skip
#: parts of a name that mark a secret: such a variable is passed only when pass_env names it.
SECRET_PARTS = frozenset({"KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS"})

#: the launcher dies at once when one of its processes has failed, not up to a minute later.
ENGINE_ENV = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one engine: ``write_config_file()`` first, then ``argv`` with ``env``."""

    argv: list[str]
    env: dict[str, str]
    #: for ``Authorization: Bearer``; it is in the config file only.
    api_key: str
    #: read once, while the server parses its arguments: may be deleted when it answers.
    config_file: Path
    config: dict[str, Any]

    def write_config_file(self) -> None:
        """Write SGLang's --config file with mode 0600; one that exists is replaced. Blocks."""
        self.config_file.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(self.config_file, flags, 0o600), "w") as file:
            json.dump(self.config, file)  # JSON is YAML


def launch_command(
    fleet: Fleet,
    *,
    port: int,
    nonce: str,
    config_file: Path,
    index: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> LaunchCommand:
    """Return how to start engine ``index`` of ``fleet`` on ``port`` of the loopback interface.

    ``nonce`` becomes its first weight version, ``config_file`` (``*.yaml``) holds its API key, and
    ``environ`` is the daemon's environment, of which the engine inherits a named part. Raises
    ConfigError for a [fleet.sglang] or a GPU count that cannot be used.
    """
    problems = check_sglang_table(fleet.sglang)
    if problems:
        raise ConfigError(problems)
    if config_file.suffix != ".yaml":
        raise ValueError(f"cannot use {config_file} as SGLang's --config: it takes *.yaml only")
    gpus_per_engine = fleet.gpus_per_engine or 1
    flags = _flags(fleet)
    api_key = secrets.token_hex(32)
    # SGLang's own parser knows what "false" means for each of its flags; argv has no word for it.
    config = {name: False for name, value in flags.items() if value is False}
    argv = [fleet.python or sys.executable, "-W", "ignore"]
    argv += [str(CPU_LAUNCHER)] if fleet.device == "cpu" else ["-m", "sglang.launch_server"]
    for name, value in flags.items():
        argv += _words(name, value)
    # Last, so that no spelling of a flag in the table above can win over these.
    argv += ["--model-path", fleet.model, "--device", fleet.device]
    if gpus_per_engine > 1:
        argv += ["--tp-size", str(gpus_per_engine)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", nonce]
    argv += ["--config", str(config_file)]
    env = engine_env(fleet, environ)
    if fleet.device == "cuda":
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = gpus_for(index, gpus_per_engine, visible)
    return LaunchCommand(
        argv=argv,
        env=env,
        api_key=api_key,
        config_file=config_file,
        config={"api-key": api_key, **config},
    )


def engine_env(fleet: Fleet, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``environ`` that engines may see, and what SGLang needs beside it."""
    env = dict(ENGINE_ENV)
    if fleet.device == "cpu":
        env |= CPU_ENV
    for name, value in environ.items():
        known = name in INHERITED or name.startswith(INHERITED_PREFIXES)
        secret = not SECRET_PARTS.isdisjoint(name.split("_"))
        if (known and not secret) or name in fleet.pass_env:
            env[name] = value
    if fleet.device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    return env


def gpus_for(index: int, gpus_per_engine: int, visible: str | None = None) -> str:
    """Return CUDA_VISIBLE_DEVICES for engine ``index`` (from 0), each with its own GPUs.

    ``visible`` is the daemon's own CUDA_VISIBLE_DEVICES: engines share out what it names.
    """
    first = index * gpus_per_engine
    if visible is None:
        return ",".join(map(str, range(first, first + gpus_per_engine)))
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    chosen = gpus[first : first + gpus_per_engine]
    if len(chosen) < gpus_per_engine:
        problem = (
            f"cannot give engine {index} its {gpus_per_engine} GPUs: CUDA_VISIBLE_DEVICES={visible}"
            f" names {len(gpus)}; lower [fleet] engines, or let evald see more GPUs"
        )
        raise ConfigError([problem])
    return ",".join(chosen)


def default_max_requests(fleet: Fleet) -> int:
    """Return how many requests one engine may have in flight."""
    limit = _flags(fleet).get("max-running-requests")
    return fleet.max_requests or (limit if isinstance(limit, int) else GPU_MAX_REQUESTS)


def _flags(fleet: Fleet) -> dict[str, Any]:
    own = {flag_name(key): value for key, value in fleet.sglang.items()}
    return {**DEFAULT_FLAGS, **(CPU_FLAGS if fleet.device == "cpu" else {}), **own}


def _words(name: str, value: Any) -> list[str]:
    """Return the words of one flag: true is a bare flag, a list several words, a table JSON."""
    if value is False or value == []:
        return []
    if value is True:
        return [f"--{name}"]
    words = [_word(item) for item in (value if isinstance(value, list) else [value])]
    if len(words) == 1:
        # One word, so that a value that begins with a dash is not taken for a flag.
        return [f"--{name}={words[0]}"]
    return [f"--{name}", *words]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
