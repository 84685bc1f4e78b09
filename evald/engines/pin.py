"""One engine's pin: drain, load, and prove that it serves exactly the weights that were asked for.

The read-back proves a label. The bytes are proven by the server's own checksum, which must be equal
wherever the same digest is loaded, and by a greedy canary: its log-probabilities must be finite,
and it must carry the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from evald.engines.api import EngineAPI, EngineError, EngineRejected
from evald.engines.fast_pin import FastPin, Loaded, read_report
from evald.engines.slots import Slots
from evald.errors import EvaldError
from evald.point import PinTarget

T = TypeVar("T")

#: token ids that every vocabulary has, and what they are continued by: one pass through all of the
#: weights, which is all that a canary can tell.
CANARY_IDS = [1, 2, 3, 4]
CANARY_TOKENS = 1
CANARY_TIMEOUT_S = 60.0
#: running requests end this soon after they were aborted, or the engine hangs.
ABORT_TIMEOUT_S = 30.0
#: after the last answer a server is idle within a step or two.
IDLE_TIMEOUT_S = 2.0
#: a look at the snapshot's directory.
STAT_TIMEOUT_S = 10.0
#: digests whose checksum is remembered.
CHECKSUMS_KEPT = 64


class PinStage(enum.StrEnum):
    """Where a pin failed."""

    DRAIN = "drain"
    #: of an engine on the snapshot itself.
    START = "start"
    LOAD = "load"
    READ_BACK = "read-back"
    CHECKSUM = "checksum"
    CANARY = "canary"


class PinFailed(EvaldError):
    """One attempt failed; unless it was the drain, the engine's weights are now unknown."""

    def __init__(self, stage: PinStage, detail: str) -> None:
        super().__init__(f"{stage}: {detail}")
        self.stage = stage
        self.detail = detail


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a verified engine serves."""

    weight_version: str
    #: None where evald only reads the version.
    checksum: str | None
    #: when each part of the proof was there, from its begin (they run at the same time), and what
    #: the update took before it; for the log.
    seconds: dict[str, float] = {}


class Checksums:
    """The checksum of each digest, from whichever engine proved it first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def check(self, digest: str, checksum: str) -> None:
        """Raise PinFailed when another engine's or an earlier pin's checksum differs."""
        known = self._known.get(digest)
        if known is not None and known[0] != checksum:
            raise PinFailed(
                PinStage.CHECKSUM,
                f"the weights differ from those that {known[1]} loaded from the same bytes "
                f"({checksum[:12]} instead of {known[0][:12]})",
            )

    def learn(self, digest: str, checksum: str, engine: str) -> None:
        """Remember the checksum of a pin that was proven in every other way."""
        self._known.setdefault(digest, (checksum, engine))
        self._known.move_to_end(digest)
        while len(self._known) > CHECKSUMS_KEPT:
            self._known.popitem(last=False)


def new_weight_version(target: PinTarget) -> str:
    """Make a label that was never used before: ``run:step:digest8:nonce``."""
    return f"{target.run}:{target.step}:{target.digest[:8]}:{secrets.token_hex(4)}"


async def drain(api: EngineAPI, slots: Slots, timeout_s: float, *, owned: bool) -> None:
    """Let running requests finish within ``timeout_s``, then abort them; raises PinFailed.

    Not ``owned``: the server may have requests of others, which are left alone.
    """
    if await slots.wait_idle(timeout_s):
        return
    try:
        if owned:
            await api.abort()
        else:
            await api.abort_quietly(api.running_rids)
    except EngineError as error:
        raise PinFailed(PinStage.DRAIN, f"cannot abort running requests: {error}") from error
    if not await slots.wait_idle(ABORT_TIMEOUT_S):
        raise PinFailed(
            PinStage.DRAIN,
            f"{slots.in_flight} requests still run {ABORT_TIMEOUT_S:g} s after they were aborted",
        )


class Loading:
    """How snapshots get into engines, and how it is proven that they did.

    ``timeout_s`` holds for a load and again for a checksum. ``path_map``: path here -> path there,
    for servers that see the snapshots elsewhere. ``fast``: whether evald's own loader is used;
    None: it is not.
    """

    def __init__(
        self,
        *,
        load_format: str,
        timeout_s: float,
        checksums: Checksums,
        path_map: Mapping[str, str] | None = None,
        fast: FastPin | None = None,
    ) -> None:
        self.load_format = load_format
        self.timeout_s = timeout_s
        self.checksums = checksums
        self.fast = fast or FastPin("off")
        #: the longest prefix wins.
        self._path_map = sorted(
            ((Path(here), Path(there)) for here, there in (path_map or {}).items()),
            key=lambda pair: len(pair[0].parts),
            reverse=True,
        )

    def path_there(self, directory: Path) -> str:
        """Tell where the server sees ``directory``."""
        for here, there in self._path_map:
            if directory.is_relative_to(here):
                return str(there / directory.relative_to(here))
        return str(directory)

    async def load(self, api: EngineAPI, target: PinTarget, version: str) -> Loaded:
        """Load ``target`` into a drained engine under the label ``version``.

        Raises PinFailed: the weights are unknown then.
        """
        if target.directory is None:
            raise PinFailed(PinStage.LOAD, "the point has no directory to load from")
        load_format = self.fast.format(target.digest, self.load_format)
        return await self.load_directory(api, target.directory, version, load_format)

    async def load_directory(
        self, api: EngineAPI, directory: Path, version: str, load_format: str
    ) -> Loaded:
        """Load the weights in ``directory``, which need not be a snapshot; raises PinFailed."""
        began = time.monotonic()
        try:
            # A server answers a moment before it has done with a request, and an update that comes
            # in that moment fails: it loads, and then cannot flush.
            with contextlib.suppress(EngineRejected):  # somebody else's: the update waits for them
                await api.flush_cache(IDLE_TIMEOUT_S)
            # the load format is sticky on the server, hence named in every update
            message = await api.update_weights(
                self.path_there(directory), version, load_format, self.timeout_s
            )
        except EngineError as error:
            raise PinFailed(PinStage.LOAD, str(error)) from error
        return Loaded(
            load_format=load_format,
            report=read_report(message),
            update_s=time.monotonic() - began,
        )

    async def prove(
        self,
        api: EngineAPI,
        digest: str,
        version: str,
        *,
        engine: str,
        layout: str,
        loaded: Loaded | None = None,
    ) -> Proof:
        """Prove that the engine serves ``digest`` under the label ``version``; raises PinFailed.

        ``layout``: engines of one layout have equal checksums for equal weights. ``loaded``: by
        which update it came to them, if it did by one.
        """
        began = time.monotonic()
        seconds = {} if loaded is None else {"update_s": round(loaded.update_s, 4)}

        async def part(stage: PinStage, work: Awaitable[T]) -> T:
            try:
                return await work
            except EngineError as error:
                raise PinFailed(stage, str(error)) from error
            finally:
                seconds[f"{stage.name.lower()}_s"] = round(time.monotonic() - began, 4)

        key = f"{digest}/{layout}"
        # none of the three needs another: the server is asked for all at once
        read_back, checksum, generated = await asyncio.gather(
            part(PinStage.READ_BACK, self._read_back(api, version)),
            part(PinStage.CHECKSUM, self._checksum(api, key)),
            part(PinStage.CANARY, canary(api, version)),
            return_exceptions=True,
        )
        # a wrong label says more than wrong bytes do, and those more than a wrong answer
        if isinstance(read_back, BaseException):
            raise read_back
        if isinstance(checksum, BaseException):
            raise checksum
        if isinstance(generated, BaseException):
            raise generated
        self.checksums.learn(key, checksum, engine)
        return Proof(weight_version=version, checksum=checksum, seconds=seconds)

    async def _read_back(self, api: EngineAPI, version: str) -> None:
        served = await served_version(api)
        if served != version:
            raise PinFailed(
                PinStage.READ_BACK,
                f"the engine says it serves {served!r} instead of {version!r}",
            )

    async def _checksum(self, api: EngineAPI, key: str) -> str:
        checksum = await api.weights_checksum(self.timeout_s)
        self.checksums.check(key, checksum)
        return checksum


def expected_version(target: PinTarget) -> str:
    """Tell the label that engines have to come to, where evald does not load."""
    return target.weight_version or str(target.step)


async def served_version(api: EngineAPI) -> str | None:
    """Read the label that the engine says it serves."""
    served = (await api.model_info()).get("weight_version")
    return None if served is None else str(served)


async def canary(api: EngineAPI, version: str) -> None:
    """Generate from a fixed prompt; the answer must be finite and of the new weights.

    Raises EngineError or PinFailed.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
    answers = await api.generate(
        [CANARY_IDS], [sampling], [f"canary/{version}/"], timeout_s=CANARY_TIMEOUT_S, logprobs=True
    )
    answer = answers[0]
    if answer.versions != {version}:
        raise PinFailed(
            PinStage.CANARY, f"it was answered by {sorted(answer.versions)}, not {version!r}"
        )
    if answer.reason != "length":
        raise PinFailed(PinStage.CANARY, f"it ended with {answer.reason!r} before its length")
    values = answer.logprobs
    if len(values) != CANARY_TOKENS:
        raise PinFailed(
            PinStage.CANARY, f"{len(values)} of {CANARY_TOKENS} tokens have a log-probability"
        )
    bad = [value for value in values if not _is_finite(value)]
    if bad:
        raise PinFailed(
            PinStage.CANARY,
            f"log-probabilities are not finite ({bad[0]}): NaN or Inf in the weights",
        )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


async def is_gone(directory: Path | None) -> bool:
    """Whether the snapshot's directory has vanished (it may, in a root that evald does not own).

    False, too, when its file system does not answer: the load has a deadline of its own.
    """
    if directory is None:
        return False  # weights that are in no directory
    try:
        async with asyncio.timeout(STAT_TIMEOUT_S):
            return not await asyncio.to_thread(directory.is_dir)
    except TimeoutError:
        return False
