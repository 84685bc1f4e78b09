"""Launches real SGLang: a fresh port, a fresh nonce, a fresh log file for each attempt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.config import Fleet
from evald.engines.argument import ServerArguments
from evald.engines.flags import launch_command
from evald.engines.gpus import claim_gpus
from evald.engines.launcher import Boot, Launched
from evald.engines.plan import EnginePlan
from evald.engines.ports import free_port
from evald.engines.process import EngineProcess
from evald.engines.process_log import log_fault, next_log

#: one of these is in every directory that has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


class SGLangLauncher:
    """Starts the engine of ``plan`` with ``env``; logs: ``directory/<its name>/0001.log``, ..."""

    def __init__(
        self,
        plan: EnginePlan,
        config: Fleet,
        directory: Path,
        *,
        env: Mapping[str, str],
        arguments: ServerArguments | None = None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._directory = directory / plan.name
        self._env = env
        self._arguments = arguments

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        """Start the server's process; raises EvaldError or OSError."""
        gpus = None
        if self._config.device == "cuda":
            gpus = await asyncio.to_thread(claim_gpus, self._plan.gpus)
        log_path = await asyncio.to_thread(next_log, self._directory, keep=self._config.keep_logs)
        port = await asyncio.to_thread(free_port)
        config, plan, nonce = self._config, self._plan, f"launch-{attempt}-{secrets.token_hex(8)}"
        if boot is not None:
            config = msgspec.structs.replace(config, model=str(boot.directory))
            nonce = boot.weight_version
            if not await asyncio.to_thread(_has_tokenizer, boot.directory):
                plan = plan.with_default("tokenizer_path", self._config.model, "the base model")
        command = launch_command(
            config,
            plan,
            port=port,
            nonce=nonce,
            config_file=self._directory / "launch.yaml",
            env=self._env,
            arguments=self._arguments,
            cuda_visible=gpus,
        )
        await asyncio.to_thread(command.write_config_file)
        process = await EngineProcess.start(command.argv, command.env, log_path, name=plan.name)
        return Launched(
            process=process,
            url=f"http://127.0.0.1:{port}",
            api_key=command.api_key,
            nonce=nonce,
            log=str(log_path),
        )

    def log_fault(self) -> str:
        """Try to write beside the logs."""
        return log_fault(self._directory)


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)
