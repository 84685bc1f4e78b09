"""Launches real SGLang: a fresh port, a fresh nonce, a fresh log file for each attempt."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec

from evald.config import Fleet
from evald.engines.flags import launch_command
from evald.engines.launcher import Boot, Launched
from evald.engines.ports import free_port
from evald.engines.process import EngineProcess

#: one of these is in every directory that has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


class SGLangLauncher:
    """Starts engine ``index`` (from 0) of the fleet; logs go to ``directory/name/0001.log``, ..."""

    def __init__(self, name: str, index: int, config: Fleet, directory: Path) -> None:
        self._name = name
        self._index = index
        self._config = config
        self._directory = directory / name

    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        """Start the server's process; raises EvaldError or OSError."""
        log_path = await asyncio.to_thread(self._next_log)
        port = await asyncio.to_thread(free_port)
        if boot is None:
            config, nonce = self._config, f"launch-{attempt}-{secrets.token_hex(8)}"
        else:
            config = await asyncio.to_thread(_on_snapshot, self._config, boot.directory)
            nonce = boot.weight_version
        command = launch_command(
            config,
            port=port,
            nonce=nonce,
            config_file=self._directory / "launch.yaml",
            index=self._index,
        )
        await asyncio.to_thread(command.write_config_file)
        process = await EngineProcess.start(command.argv, command.env, log_path, name=self._name)
        return Launched(
            process=process,
            url=f"http://127.0.0.1:{port}",
            api_key=command.api_key,
            nonce=nonce,
            log=str(log_path),
        )

    def _next_log(self) -> Path:
        """Choose the next log file, numbers go on over daemon restarts; delete the oldest."""
        self._directory.mkdir(parents=True, exist_ok=True)
        logs = sorted(path for path in self._directory.glob("*.log") if path.stem.isdigit())
        for path in logs[: max(len(logs) + 1 - self._config.keep_logs, 0)]:
            path.unlink(missing_ok=True)
        number = int(logs[-1].stem) + 1 if logs else 1
        return self._directory / f"{number:04d}.log"


def _on_snapshot(config: Fleet, directory: Path) -> Fleet:
    """Start on a snapshot; with the base model's tokenizer where it has none of its own."""
    sglang = config.sglang
    own = any((directory / name).is_file() for name in _TOKENIZER_FILES)
    if not own and not {"tokenizer-path", "tokenizer_path"} & set(sglang):
        sglang = {**sglang, "tokenizer_path": config.model}
    return msgspec.structs.replace(config, model=str(directory), sglang=sglang)
