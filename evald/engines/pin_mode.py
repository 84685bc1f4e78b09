"""Whether running engines can take new weights at all: tried once, with those that they have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from evald.engines.api import EngineAPI, EngineError
from evald.engines.pin import Loading, PinFailed, canary

log = structlog.get_logger(__name__)

#: failed tries, on one engine or two, before updates are given up.
TRIES = 2


class PinMode:
    """How the engines of one group take snapshots: by updates while they run, or by starts.

    ``model``: the base model's directory, for the test; None: there is no test, updates it is.
    Quantized weights, and architectures whose update from disk is broken, fail it.
    """

    def __init__(self, *, restart: bool, model: Path | None) -> None:
        #: engines are started on each snapshot.
        self.restart = restart
        #: an engine is being tested right now.
        self.testing = False
        self._model = None if restart else model
        self._failures = 0
        self._lock = asyncio.Lock()

    async def test(self, engine: str, api: EngineAPI, loading: Loading, nonce: str) -> str:
        """Update a fresh engine with the very weights it has, unless that has been tried already.

        Returns why the engine cannot be used any more (its weights are unknown), or "". A second
        failure changes the mode of all engines of the group.
        """
        async with self._lock:
            if self._model is None:
                return ""
            self.testing = True
            try:
                trouble = await _trouble(api, loading, self._model, nonce)
            finally:
                self.testing = False
            if not trouble:
                log.info("pin_mode", mode="update", tested_on=engine)
                self._model = None
                return ""
            self._failures += 1
            if self._failures < TRIES:
                log.warning("update_test_failed", engine=engine, detail=trouble)
            else:
                self._model = None
                self.restart = True
                log.warning(
                    "pin_mode_restart",
                    why=f"a running engine, updated with the very weights it has, fails: {trouble}",
                    so="each snapshot is a start of the engines on it, which takes longer",
                    hint="set fleet.pin_mode = 'restart' to go without this test",
                )
            return f"the update test failed: {trouble}"


async def _trouble(api: EngineAPI, loading: Loading, model: Path, nonce: str) -> str:
    """Say what an update with the same weights does wrong; empty when nothing."""
    try:
        before = await api.weights_checksum(loading.timeout_s)
        await loading.load_directory(api, model, nonce)
        after = await api.weights_checksum(loading.timeout_s)
        if after != before:
            return (
                f"its checksum is {after[:12]} after it and was {before[:12]} before: the update "
                "does not do what a start does"
            )
        await canary(api, nonce)
    except (EngineError, PinFailed) as error:
        return str(error)
    return ""
