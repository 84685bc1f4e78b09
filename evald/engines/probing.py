"""Whether a running server still generates."""

from __future__ import annotations

import asyncio

import structlog

from evald.engines.api import EngineAPI, EngineError
from evald.engines.engine import Engine

log = structlog.get_logger(__name__)


class Probes:
    """Counts failed probes in a row; an answer to a request is worth more than any probe."""

    def __init__(self, engine: Engine, api: EngineAPI) -> None:
        self._engine = engine
        self._api = api
        self._failed = 0
        #: until the next probe is due.
        self.wait_s = engine.limits.probe_interval_s

    def forget(self) -> None:
        """Start to count again: something else has shown that the server works."""
        self._failed = 0
        self.wait_s = self._engine.limits.probe_interval_s

    async def probe(self) -> str:
        """Probe once; what is wrong when it was once too often, else an empty string."""
        limits = self._engine.limits
        began = self._engine.clock()
        failure = await self._failure()
        took_s = self._engine.clock() - began
        self._failed = self._failed + 1 if failure else 0
        # a server that hangs is not given another interval; one that refuses is given time
        again_s = max(limits.probe_timeout_s - took_s, 0.0)
        self.wait_s = min(limits.probe_interval_s, again_s if failure else float("inf"))
        if self._failed < limits.probe_failures:
            return ""
        return f"{self._failed} health probes in a row failed: {failure}"

    async def _failure(self) -> str:
        """Probe unless a response proves more; an order does not wait for the probe."""
        engine, limits = self._engine, self._engine.limits
        began = engine.clock()
        if engine.last_answer > began - limits.probe_interval_s:
            return ""
        probe = asyncio.create_task(
            self._api.health_generate(limits.probe_timeout_s), name=f"probe:{engine.name}"
        )
        woken = asyncio.create_task(engine.woken.wait(), name=f"probe-wake:{engine.name}")
        try:
            await asyncio.wait((probe, woken), return_when=asyncio.FIRST_COMPLETED)
            if not probe.done():
                return ""
            await probe
        except EngineError as error:
            if engine.last_answer > began:
                return ""
            log.warning("engine_probe_failed", engine=engine.name, detail=str(error))
            return str(error)
        finally:
            probe.cancel()
            woken.cancel()
        return ""
