"""Whether running engines can take new weights at all: tried once, with those that they have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from evald.engines.api import EngineAPI, EngineError
from evald.engines.fast_pin import FastPin, Loaded
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

        Where that works, evald's own loader has its test, too. Returns why the engine cannot be
        used any more (its weights are unknown), or "". A second failure changes the mode of all
        engines of the group.
        """
        async with self._lock:
            if self._model is None:
                return ""
            same = SameWeights(api, loading, self._model, nonce)
            self.testing = True
            try:
                trouble = await same.trouble()
                if not trouble:
                    log.info("pin_mode", mode="update", tested_on=engine)
                    self._model = None
                    return await _test_fast(same, loading.fast)
            finally:
                self.testing = False
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


class SameWeights:
    """Updates a fresh engine with the very weights that it has: those of ``model``."""

    def __init__(self, api: EngineAPI, loading: Loading, model: Path, nonce: str) -> None:
        self._api = api
        self._loading = loading
        self._model = model
        self._nonce = nonce
        #: before any update.
        self.before: str | None = None
        self.plain_s = 0.0

    async def update(self, load_format: str) -> Loaded:
        """Load them once; raises PinFailed."""
        return await self._loading.load_directory(self._api, self._model, self._nonce, load_format)

    async def checksum(self) -> str:
        """Ask for the checksum of what is loaded; raises EngineError."""
        return await self._api.weights_checksum(self._loading.timeout_s)

    async def trouble(self) -> str:
        """Say what an update by SGLang's own loader does wrong; empty when nothing."""
        try:
            self.before = self.before or await self.checksum()
            self.plain_s = (await self.update(self._loading.load_format)).update_s
            after = await self.checksum()
            if after != self.before:
                return (
                    f"its checksum is {after[:12]} after it and was {self.before[:12]} before: the "
                    "update does not do what a start does"
                )
            await canary(self._api, self._nonce)
        except (EngineError, PinFailed) as error:
            return str(error)
        return ""


async def _test_fast(same: SameWeights, fast: FastPin) -> str:
    """Decide for or against evald's own loader; why the engine cannot be used any more, or ""."""
    if not fast.wanted:
        return ""
    try:
        why = await fast.test(same, same.before or "", same.plain_s)
    except (EngineError, PinFailed) as error:
        why = str(error)
    if not why:
        return ""
    fast.end(why)
    trouble = await same.trouble()  # whatever that has left behind is overwritten
    return trouble and f"after a test of the fast loader: {trouble}"
