"""One engine as its pool sees it: what it serves, what it shall serve, how it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from evald.config import EngineLimits
from evald.engines.adaptive import AdaptiveLimit
from evald.engines.api import EngineAPI, EngineUnreachable
from evald.engines.pin import Loading, PinFailed, Proof
from evald.engines.pin_mode import PinMode
from evald.engines.slots import Slots
from evald.engines.start_gate import StartGate
from evald.engines.state import ALIVE, State, StateMachine
from evald.errors import EvaldError, SnapshotGone
from evald.point import PinTarget
from evald.pulse import Pulse
from evald.status.view import EngineView

log = structlog.get_logger(__name__)

#: what an engine's task may take beyond the timeouts of what it does.
SLACK_S = 300.0


class Order(msgspec.Struct, frozen=True, eq=False):
    """One point's wish to be served; each pin() makes a new one, also for the same target."""

    target: PinTarget

    @property
    def name(self) -> str:
        """What to call it in messages."""
        target = self.target
        return str(target.directory or f"{target.run}:{target.step}")


class Upkeep(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is kept: what the postures differ in."""

    #: from launch, or the first look, to the first generated token.
    start_timeout_s: float
    #: SIGTERM to SIGKILL.
    stop_grace_s: float = 10.0
    #: evald launched the server: it may kill it, and all its requests.
    owned: bool = True
    #: how snapshots get in; None: evald never loads, it reads the version.
    loading: Loading | None = None
    #: by updates, or by starts; one object for a whole fleet.
    mode: PinMode = msgspec.field(default_factory=lambda: PinMode(restart=False, model=None))
    #: not even a probe reaches the server while no point wants it.
    on_demand: bool = False
    #: how many load their program at a time; one object for a whole fleet.
    starts: StartGate = msgspec.field(default_factory=StartGate)


class Events(Protocol):
    """What an engine tells its pool; called from the engine's task."""

    def changed(self) -> None:
        """Tell that the state changed."""

    def capacity_freed(self) -> None:
        """Tell that a request left."""

    def capacity_grown(self) -> None:
        """Tell that the engine takes more requests at a time."""

    def emptied(self) -> None:
        """Tell that the engine has no request any more."""

    def pinned(self, engine: Engine, order: Order, proof: Proof) -> None:
        """Tell that ``order`` is loaded and proven."""

    def pin_failed(self, engine: Engine, order: Order, error: PinFailed | SnapshotGone) -> bool:
        """Tell that an attempt failed; True when the engine, not the snapshot, is at fault."""

    def other_version(self, engine: Engine, order: Order, served: str | None) -> None:
        """Tell that an engine that evald does not load serves other weights than those wanted."""


class Engine:
    """What is known of one engine, and what is wanted of it.

    Its ``Supervisor`` is the one writer of ``state`` and everything about the running server; the
    pool changes it through ``give``, ``distrust``, ``restart`` and ``release`` only.
    """

    def __init__(
        self,
        name: str,
        limits: EngineLimits,
        upkeep: Upkeep,
        *,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.limits = limits
        self.upkeep = upkeep
        self.events = events
        self.clock = clock
        self.pulse = Pulse(name, clock=clock)
        self.machine = StateMachine(name, on_change=self._moved, clock=clock)
        self.slots = Slots(
            1, events.capacity_freed, on_grown=events.capacity_grown, on_idle=events.emptied
        )
        self.limit = AdaptiveLimit(self.slots, engine=name, most=limits.max_requests)
        #: what it shall serve, what it serves, and what it drains, starts or loads for.
        self.order: Order | None = None
        self.pinned: Order | None = None
        self.pinning: Order | None = None
        self.weight_version: str | None = None
        self.api: EngineAPI | None = None
        self.pid: int | None = None
        self.sglang_version: str | None = None
        #: an answer under way may go on elsewhere.
        self.may_move = True
        #: what its latest pin took, from the first byte to the proof, seconds.
        self.pin_s = 0.0
        self.was_ready = False
        self.restarts = 0
        #: good answers of all its lives, and their tokens.
        self.answers = self.prompt_tokens = self.generated_tokens = 0
        #: number of its process: goes up with each launch.
        self.life = 0
        self.last_answer = -float("inf")
        #: set when there is something new to look at: an order, or distrust.
        self.woken = asyncio.Event()
        self.distrusted = ""
        #: set when the current life shall end now, for ``recall_reason``.
        self.recalled = asyncio.Event()
        self.recall_reason = ""
        self.released = asyncio.Event()
        self.aborts: set[asyncio.Task[None]] = set()

    # --- what can be read ------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The current state."""
        return self.machine.state

    @property
    def alive(self) -> bool:
        """Whether the engine can work, now or after its pin."""
        return self.state in ALIVE

    @property
    def at_work(self) -> bool:
        """Whether it is alive, or being started on a snapshot: no other need be taken for that."""
        return self.alive or self.pinning is not None

    def is_dead(self, life: int) -> bool:
        """Whether process number ``life`` has ended, or is ending."""
        return self.life != life or not self.alive

    def serves(self, order: Order) -> bool:
        """Whether ``order`` is loaded, proven and open for requests."""
        return (
            self.pinned is order
            # what comes in once another is wanted, that one would wait for
            and (self.order is order or self.order is None)
            and self.machine.state is State.SERVING
        )

    def tries(self, order: Order) -> bool:
        """Whether the engine is on its way to ``order``, a start on it included."""
        return self.pinning is order or (self.alive and self.order is order)

    @property
    def starting_on(self) -> Order | None:
        """The order whose snapshot the server is being started on; None: on no snapshot."""
        return self.pinning if self.state is State.STARTING else None

    def connected_api(self) -> EngineAPI:
        """Return the API of the running server; raises EngineUnreachable when there is none."""
        if self.api is None:
            raise EngineUnreachable(f"engine {self.name} is down")
        return self.api

    def view(self) -> EngineView:
        """Describe the engine for status and records."""
        meter = self.limit.meter
        load, tokens_per_s = meter.load, meter.tokens_per_s
        return EngineView(
            name=self.name,
            state=str(self.state),
            weight_version=self.weight_version,
            in_flight=self.slots.in_flight,
            restarts=self.restarts,
            pid=self.pid,
            detail=self.machine.detail,
            tokens_per_s=None if tokens_per_s is None else round(tokens_per_s, 1),
            kv_use=None if load is None else round(load.token_usage, 4),
            waiting=None if load is None else load.waiting,
            answers=self.answers,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
        )

    def _moved(self, state: State) -> None:
        limits, upkeep = self.limits, self.upkeep
        # the longest way through a state: a start, its test by an update, an end
        limit_s = upkeep.start_timeout_s + upkeep.stop_grace_s + limits.drain_timeout_s + SLACK_S
        waits = state in (State.STOPPED, State.QUARANTINED)  # for a point, for an operator
        self.pulse.rest(str(state), math.inf if waits else limit_s + 2 * limits.load_timeout_s)
        self.events.changed()

    # --- what the pool asks for ------------------------------------------------------------------

    def give(self, order: Order | None) -> None:
        """Set what to serve; None: whatever is loaded, and the base model after a restart."""
        if order is self.order:
            return
        self.order = order
        self.woken.set()
        if order is not None and self.starting_on not in (None, order):
            self._recall("another snapshot is wanted")
        if order is None and self.upkeep.on_demand and self.state is State.STARTING:
            self._recall("no point wants it any more")

    def distrust(self, detail: str) -> None:
        """Have the engine restarted: it answered with weights that nobody asked for."""
        self.distrusted = self.distrusted or detail
        self.woken.set()

    def restart(self) -> None:
        """Restart it on an operator's word: now, and not held against it. Raises EvaldError."""
        if not self.upkeep.owned:
            raise EvaldError(
                f"cannot restart engine {self.name}: evald did not start it; whoever runs it can"
            )
        if self.state is State.QUARANTINED:
            raise EvaldError(
                f"cannot restart engine {self.name}: it is in quarantine; release it instead"
            )
        self._recall("an operator restarts it")

    def release(self) -> None:
        """Take it out of quarantine on an operator's word. Raises EvaldError."""
        if self.state is not State.QUARANTINED:
            raise EvaldError(
                f"cannot release engine {self.name}: it is {self.state}, not in quarantine"
            )
        self.released.set()

    def _recall(self, reason: str) -> None:
        log.info("engine_recalled", engine=self.name, reason=reason)
        self.recall_reason = reason
        self.recalled.set()

    # --- what requests leave behind --------------------------------------------------------------

    def credit(self, version: str, tokens: int, *, prompt_tokens: int, whole: bool = True) -> str:
        """Note a good answer of ``version``: that beats any probe. Returns who it came from.

        ``whole``: false for a piece of an answer that ends elsewhere.
        """
        del version
        self.answers += whole
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += tokens
        self.last_answer = self.clock()
        self.limit.note_tokens(tokens)
        return self.name

    def abort_soon(self, rids: list[str]) -> None:
        """Abort requests whose answers nobody waits for any more."""
        if self.api is not None and rids:
            task = asyncio.create_task(self.api.abort_quietly(rids), name=f"abort:{self.name}")
            self.aborts.add(task)
            task.add_done_callback(self.aborts.discard)
