"""One engine's pin: drain, load, and prove that it serves exactly the weights that were asked for.

The read-back proves a label. The bytes are proven by the server's own checksum, which must be equal
wherever the same digest is loaded, and by a greedy canary: its log-probabilities must be finite,
and it must carry the version.
"""

from __future__ import annotations

import asyncio
import enum
import math
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.engines.api import EngineAPI, EngineError
from evald.engines.slots import Slots
from evald.errors import EvaldError
from evald.point import PinTarget

#: token ids that every vocabulary has; short, and the same for ever.
CANARY_IDS = list(range(1, 17))
CANARY_TOKENS = 4
CANARY_TIMEOUT_S = 60.0
#: running requests end this soon after they were aborted, or the engine hangs.
ABORT_TIMEOUT_S = 30.0
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
    for servers that see the snapshots elsewhere.
    """

    def __init__(
        self,
        *,
        load_format: str,
        timeout_s: float,
        checksums: Checksums,
        path_map: Mapping[str, str] | None = None,
    ) -> None:
        self.load_format = load_format
        self.timeout_s = timeout_s
        self.checksums = checksums
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

    async def load(self, api: EngineAPI, target: PinTarget, version: str) -> None:
        """Load ``target`` into a drained engine under the label ``version``.

        Raises PinFailed: the weights are unknown then.
        """
        if target.directory is None:
            raise PinFailed(PinStage.LOAD, "the point has no directory to load from")
        await self.load_directory(api, target.directory, version)

    async def load_directory(self, api: EngineAPI, directory: Path, version: str) -> None:
        """Load the weights in ``directory``, which need not be a snapshot; raises PinFailed."""
        try:
            # the load format is sticky on the server, hence named in every update
            await api.update_weights(
                self.path_there(directory), version, self.load_format, self.timeout_s
            )
        except EngineError as error:
            raise PinFailed(PinStage.LOAD, str(error)) from error

    async def prove(
        self, api: EngineAPI, digest: str, version: str, *, engine: str, layout: str
    ) -> Proof:
        """Prove that the engine serves ``digest`` under the label ``version``; raises PinFailed.

        ``layout``: engines of one layout have equal checksums for equal weights.
        """
        stage = PinStage.READ_BACK
        try:
            served = await served_version(api)
            if served != version:
                raise PinFailed(
                    stage, f"the engine says it serves {served!r} instead of {version!r}"
                )
            stage = PinStage.CHECKSUM
            checksum = await api.weights_checksum(self.timeout_s)
            self.checksums.check(f"{digest}/{layout}", checksum)
            stage = PinStage.CANARY
            await canary(api, version)
        except EngineError as error:
            raise PinFailed(stage, str(error)) from error
        self.checksums.learn(f"{digest}/{layout}", checksum, engine)
        return Proof(weight_version=version, checksum=checksum)


def expected_version(target: PinTarget) -> str:
    """Tell the label that engines have to come to, where evald does not load."""
    return target.weight_version or str(target.step)


async def served_version(api: EngineAPI) -> str | None:
    """Read the label that the engine says it serves."""
    served = (await api.model_info()).get("weight_version")
    return None if served is None else str(served)


async def canary(api: EngineAPI, version: str) -> None:
    """Generate from a fixed prompt; the answer must be finite and of the new weights."""
    sampling = {"temperature": 0.0, "max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
    answers = await api.generate(
        [CANARY_IDS], [sampling], [f"canary/{version}/"], timeout_s=CANARY_TIMEOUT_S, logprobs=True
    )
    answer = answers[0]
    if answer.versions != {version}:
        raise PinFailed(
            PinStage.CANARY, f"it was answered by {sorted(answer.versions)}, not {version!r}"
        )
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
