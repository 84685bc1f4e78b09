"""One pin of a pool: who verified it, who failed, and whether the snapshot is to blame."""

from __future__ import annotations

import time
from collections.abc import Callable

from evald.engines.engine import Engine, Order
from evald.engines.pin import PinFailed, PinStage, Proof
from evald.errors import EvalSkip, PinViolation, SnapshotGone
from evald.point import PinTarget
from evald.postures.contract import Pin


class Campaign:
    """The evidence of one ``pin()``, from its call until the point's end.

    ``attempts``: failed attempts on the digest, on one engine or several, that make the snapshot
    suspect. ``scouting``: only one engine at a time tries, until the first has verified.
    """

    def __init__(
        self,
        target: PinTarget,
        *,
        attempts: int,
        scouting: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order = Order(target)
        self.pin = Pin(target=target, weight_versions={})
        #: every version that was proven: all that a response may carry.
        self.versions: set[str] = set()
        self.gone: SnapshotGone | None = None
        #: ends the point whatever the engines do: weights changed, or nothing reaches them.
        self.failure: EvalSkip | None = None
        #: engine -> other version that it was last seen with.
        self.others: dict[str, str | None] = {}
        self.closed = False
        self.began = clock()
        #: when the first engine verified it.
        self.verified_at: float | None = None
        #: since when no engine serves the order, once one did.
        self.down_since: float | None = None
        self._attempts = attempts
        self._scouting = scouting
        self._failures: list[tuple[str, PinFailed]] = []
        self._clock = clock

    @property
    def verified(self) -> bool:
        """Whether an engine has proven it, at any time."""
        return bool(self.versions)

    @property
    def scouting(self) -> bool:
        """Whether one engine goes first."""
        return self._scouting and not self.verified

    @property
    def suspect(self) -> bool:
        """Whether the attempts are used up: nobody may try again."""
        return not self.verified and len(self._failures) >= self._attempts

    @property
    def open(self) -> bool:
        """Whether engines may still join."""
        return not (self.closed or self.suspect or self.gone or self.failure)

    def add_proof(self, engine: str, proof: Proof) -> None:
        """Take in that an engine is verified."""
        if self.verified_at is None:
            self.verified_at = self._clock()
        self.versions.add(proof.weight_version)
        self.pin.weight_versions[engine] = proof.weight_version
        self.others.pop(engine, None)

    def add_failure(self, engine: str, error: PinFailed | SnapshotGone) -> bool:
        """Take in a failed attempt; True when the engine itself is at fault."""
        if isinstance(error, SnapshotGone):
            self.gone = error
            return False
        if error.stage is PinStage.DRAIN:
            return True
        self._failures.append((engine, error))
        return self.verified

    def fail(self, failure: EvalSkip) -> None:
        """End the point; the first reason stands."""
        self.failure = self.failure or failure

    def has_failed(self, engine: str) -> bool:
        """Whether this engine has tried in vain."""
        return any(name == engine for name, _ in self._failures)

    def verdict(self, engines: list[Engine]) -> PinViolation | None:
        """Blame the snapshot: attempts used up, nobody tries any more, the base model loads."""
        if not self.suspect:
            return None
        free = [engine for engine in engines if engine.alive]
        if not free or any(engine.pinning is self.order for engine in engines):
            return None
        name, error = self._failures[-1]
        where = ", ".join(sorted({name for name, _ in self._failures}))
        # a server of somebody else's is not started again: that it answers must do
        well = "the base model loads" if free[0].upkeep.owned else "the server answers"
        directory = self.order.target.directory
        snapshot = directory.name if directory else self.order.name
        return PinViolation(
            f"cannot pin snapshot {snapshot}: {len(self._failures)} "
            f"attempts failed (on {where}) while {well}; "
            f"the last one on {name} at stage {error.stage}: {error.detail}"
        )

    def note_serving(self, engines: list[Engine]) -> None:
        """Keep the time since which no engine serves the order."""
        if any(engine.serves(self.order) for engine in engines):
            self.down_since = None
        elif self.down_since is None and self.verified:
            self.down_since = self._clock()
