"""One pin of a pool: who verified it, who failed, and whether the snapshot is to blame."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from evald.engines.engine import Engine, Order
from evald.engines.pin import PinFailed, PinStage, Proof
from evald.errors import EvalSkip, PinViolation, SnapshotGone
from evald.point import PinTarget
from evald.postures.assignment import Need
from evald.postures.contract import Pin

#: of the samples without an answer that there were at the last look.
_LOOK_AGAIN = 7 / 8


class Campaign:
    """The evidence of one ``pin()``, from its call until the point's end.

    ``attempts``: failed attempts on the digest, on one engine or several, that make the snapshot
    suspect. ``scouting``: only one engine at a time tries, until the first has verified.
    ``on_need``: called when it may need fewer engines than before.
    """

    def __init__(
        self,
        target: PinTarget,
        *,
        attempts: int,
        scouting: bool,
        on_need: Callable[[], None] = lambda: None,
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
        #: samples without an answer, since all questions are handed over; None: not all are.
        self.left: int | None = None
        #: since when.
        self.tail_since: float | None = None
        #: how many there were when it was last time to look.
        self._looked_at = math.inf
        #: samples that wait for room on an engine.
        self.waiting = 0
        self._on_need = on_need
        self._on_room: list[Callable[[], None]] = []
        #: None: it was told already.
        self._on_spare: list[Callable[[], None]] | None = []
        self._attempts = attempts
        self._scouting = scouting
        #: attempts that failed since the latest proof.
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

    @property
    def wants_engines(self) -> bool:
        """Whether engines are of use: nobody may join one whose snapshot is gone, but all stay."""
        return self.open or (self.verified and not (self.closed or self.failure))

    def add_proof(self, engine: str, proof: Proof) -> None:
        """Take in that an engine is verified."""
        if self.verified_at is None:
            self.verified_at = self._clock()
        self.versions.add(proof.weight_version)
        self.pin.weight_versions[engine] = proof.weight_version
        self.others.pop(engine, None)
        self._failures.clear()

    def add_failure(
        self, engine: str, error: PinFailed | SnapshotGone, *, served: bool = False
    ) -> bool:
        """Take in a failed attempt; True when the engine itself is at fault.

        ``served``: others serve the snapshot meanwhile, or may be about to.
        """
        if isinstance(error, SnapshotGone):
            self.gone = error
            return False
        if error.stage is PinStage.DRAIN:
            return True
        self._failures.append((engine, error))
        if self.verified and not served and len(self._failures) >= self._attempts:
            # what was proven once was damaged later: it must not cost one engine after the other
            self.gone = SnapshotGone(
                f"{self.order.name} was loaded before, and since then {len(self._failures)} "
                f"attempts failed; the last one on {engine} at stage {error.stage}: {error.detail}"
            )
            return False
        return self.verified

    def fail(self, failure: EvalSkip) -> None:
        """End the point; the first reason stands."""
        self.failure = self.failure or failure

    def has_failed(self, engine: str) -> bool:
        """Whether this engine has tried in vain."""
        return any(name == engine for name, _ in self._failures)

    def verdict(self, engines: Sequence[Engine]) -> PinViolation | None:
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

    def note_serving(self, engines: Sequence[Engine], *, starved: bool) -> None:
        """Keep the time since which no engine serves the order.

        ``starved``: all that work are busy with other points, which is no failure of theirs.
        """
        if starved or any(engine.serves(self.order) for engine in engines):
            self.down_since = None
        elif self.down_since is None and self.verified:
            self.down_since = self._clock()

    # --- what it needs ---------------------------------------------------------------------------

    def need(self, *, rolling: bool) -> Need:
        """Tell what it can make use of; not ``rolling``: of every engine until its end."""
        return Need(
            feeds=self.left is None or not rolling,
            samples=self.left or 0,
            waiting=self.waiting,
            joinable=self.gone is None,
        )

    def note_left(self, samples: int) -> bool:
        """Take in how many samples have no answer; whether it is time to look who is spared.

        That takes longer the more engines there are: not each answer of thousands is worth it.
        """
        self.left = samples
        if self.tail_since is None:
            self.tail_since = self._clock()
        if samples > _LOOK_AGAIN * self._looked_at:
            return False
        self._looked_at = samples
        return True

    @property
    def spare_told(self) -> bool:
        """Whether it was told that an engine is to be had."""
        return self._on_spare is None

    def is_late(self, least_s: float) -> bool:
        """Whether its last answers have taken so long since the last question was handed over."""
        return self.tail_since is not None and self._clock() - self.tail_since >= least_s

    def line_up(self, samples: int) -> None:
        """Take in that samples wait for room on an engine."""
        self.waiting += samples

    def step_out(self, samples: int) -> None:
        """Take in that they have found it, or wait no longer."""
        self.waiting -= samples
        if not self.waiting and self.left is not None:
            self._on_need()

    def when_room(self, call: Callable[[], None]) -> None:
        """Call whenever engines may take more samples than before."""
        self._on_room.append(call)

    def tell_room(self) -> None:
        """Tell that engines may take more samples than before."""
        for call in self._on_room:
            call()

    def when_spare(self, call: Callable[[], None]) -> None:
        """Call once an engine is to be had that it does not need."""
        if self._on_spare is None:
            call()
        else:
            self._on_spare.append(call)

    def tell_spare(self) -> None:
        """Tell that an engine is to be had."""
        calls, self._on_spare = self._on_spare or (), None
        for call in calls:
            call()
