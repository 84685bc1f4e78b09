"""The command line of one engine."""

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
from evald.engines.argument import ServerArguments
from evald.engines.plan import EnginePlan
from evald.engines.settings import command_line
from evald.engines.sglang_table import check_sglang_table
from evald.errors import ConfigError

CPU_LAUNCHER = Path(__file__).parent / "cpu_mode" / "launch.py"


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
    plan: EnginePlan,
    *,
    port: int,
    nonce: str,
    config_file: Path,
    env: Mapping[str, str],
    arguments: ServerArguments | None = None,
    cuda_visible: str | None = None,
) -> LaunchCommand:
    """Return how to start the engine of ``plan`` on ``port`` of the loopback interface.

    ``nonce`` becomes its first weight version, ``config_file`` (``*.yaml``) holds its API key.
    ``env``: see ``engine_env``; ``arguments``: what the installed SGLang said of its own;
    ``cuda_visible``: see ``claim_gpus``, None: the plan's GPUs as they are. Raises ConfigError for
    a [fleet.sglang] that cannot be used.
    """
    problems = check_sglang_table(fleet.sglang)
    if problems:
        raise ConfigError(problems)
    if config_file.suffix != ".yaml":
        raise ValueError(f"cannot use {config_file} as SGLang's --config: it takes *.yaml only")
    settings = plan.resolved.settings
    api_key = secrets.token_hex(32)
    # SGLang's own parser knows what "false" means for each of its flags; argv has no word for it.
    config = {
        name.replace("_", "-"): False
        for name, setting in settings.items()
        if setting.value is False and arguments is None
    }
    argv = [fleet.python or sys.executable, "-W", "ignore"]
    argv += [str(CPU_LAUNCHER)] if fleet.device == "cpu" else ["-m", "sglang.launch_server"]
    argv += command_line(settings, arguments)
    # Last, so that no spelling of a flag among those above can win over these.
    argv += ["--model-path", fleet.model, "--device", fleet.device]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", nonce]
    argv += ["--config", str(config_file)]
    gpus = {}
    if fleet.device == "cuda":
        gpus["CUDA_VISIBLE_DEVICES"] = cuda_visible or ",".join(plan.gpus)
        # numbers as nvidia-smi counts them
        gpus["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return LaunchCommand(
        argv=argv,
        env={**env, **gpus},
        api_key=api_key,
        config_file=config_file,
        config={"api-key": api_key, **config},
    )
