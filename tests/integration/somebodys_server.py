"""A real SGLang server (CPU mode) that somebody else runs: evald may attach to it, and no more."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self

from fleet_rig import plan_of

from evald.config import Fleet
from evald.engines.api import EngineAPI, EngineError
from evald.engines.flags import launch_command
from evald.engines.ports import free_port
from evald.engines.process import EngineProcess
from evald.testing import write_base_model


class SomebodysServer:
    """The server, and what the one who runs it can do with it by ``api``."""

    def __init__(self, root: Path, process: EngineProcess, url: str, api_key: str) -> None:
        self.root = root
        self.model = root / "base"
        self.process = process
        self.url = url
        self.api_key = api_key
        self.api = EngineAPI(url, api_key, limit=4)

    @classmethod
    async def start(cls, root: Path) -> Self:
        """Start it on a base model below ``root``."""
        model = write_base_model(root / "base", answer=1)
        fleet = Fleet(model=str(model), device="cpu", engines=1)
        plan = plan_of(fleet)
        command = launch_command(
            fleet,
            plan.engines[0],
            port=(port := free_port()),
            nonce="default",
            config_file=root / "server.yaml",
            env=plan.env,
        )
        command.write_config_file()
        process = await EngineProcess.start(
            command.argv, command.env, root / "server.log", name="somebody's"
        )
        server = cls(root, process, f"http://127.0.0.1:{port}", command.api_key)
        try:
            async with asyncio.timeout(110.0):
                while True:
                    with contextlib.suppress(EngineError):
                        await server.api.health_generate(30.0)
                        return server
                    await asyncio.sleep(0.2)
        except BaseException:
            await server.stop()
            raise

    async def load(self, directory: Path, version: str) -> None:
        await self.api.update_weights(str(directory), version, "auto", 60.0)

    async def stop(self) -> None:
        await self.api.close()
        await self.process.stop(5.0)
