"""Somebody's router in front of all engines: the one lane of every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from evald.engines.adaptive import MOST, AdaptiveLimit, read_load
from evald.engines.api import EngineAPI, EngineError, EngineUnreachable
from evald.engines.engine import Engine, Order
from evald.engines.pin import CANARY_IDS, served_version
from evald.engines.server_size import total
from evald.engines.slots import Slots
from evald.engines.state import State
from evald.errors import Unhealthy
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes

log = structlog.get_logger(__name__)

#: between two probes of the route, and how long one may take.
ROUTE_POLL_S = 0.5
ROUTE_PROBE_S = 30.0


class Front:
    """Takes requests for a point once the route has answered a one-token probe of its weights.

    It opens when every engine serves the point for the first time. After each loss of an engine it
    is closed until a probe is answered again: routers answer 503, or wait for the dead, for a
    while. ``url``: ``http://host:port``.
    """

    name = "router"

    def __init__(self, url: str, api_key: str | None, *, route_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._route_timeout_s = route_timeout_s
        self._api: EngineAPI | None = None
        self._engines: Sequence[Engine] = ()
        self._on_grown: Callable[[], None] = lambda: None
        self._changes = Changes()
        self._campaign: Campaign | None = None
        self._open = False
        #: it was open for this point before: not every engine is needed any more.
        self._was_open = False
        #: engines that serve the point.
        self._serving: set[str] = set()
        self._wanted = asyncio.Event()
        self._suspects: set[asyncio.Task[None]] = set()
        self.slots = Slots(1)
        self._limit = AdaptiveLimit(self.slots, engine=self.name)

    #: a router does not say which engine answers, hence not which one has died.
    life = 0

    def is_dead(self, _life: int) -> bool:
        """Tell nothing of the engines behind it."""
        return False

    def stand_before(
        self,
        engines: Sequence[Engine],
        changes: Changes,
        *,
        most: int | None,
        on_grown: Callable[[], None],
    ) -> None:
        """Take the place in front of ``engines``, each of which takes ``most`` samples at once.

        ``changes`` wakes who waits for an open route, ``on_grown`` who hands over questions.
        """
        self._engines = engines
        self._changes = changes
        self._on_grown = on_grown
        self.slots = Slots(1, changes.notify, on_grown=on_grown)
        self._limit = AdaptiveLimit(self.slots, engine=self.name, most=self._most(most))

    # --- what requests need ----------------------------------------------------------------------

    def serves(self, order: Order) -> bool:
        """Whether requests for ``order`` may be sent now."""
        campaign = self._campaign
        return (
            self._open
            and bool(self._serving)
            and campaign is not None
            and (campaign.order is order)
        )

    def connected_api(self) -> EngineAPI:
        """Return the router's API; raises EngineUnreachable when evald stops."""
        if self._api is None:
            raise EngineUnreachable("the router is not in use")
        return self._api

    def credit(self, version: str, tokens: int, *, prompt_tokens: int, whole: bool = True) -> str:
        """Tell whose answer it was: each engine has a version of its own where evald loads."""
        self._limit.note_tokens(tokens)
        owners = [engine for engine in self._engines if engine.weight_version == version]
        if len(owners) != 1:
            return self.name
        return owners[0].credit(version, tokens, prompt_tokens=prompt_tokens, whole=whole)

    def abort_soon(self, rids: list[str]) -> None:
        """Abort at every engine: a router need not know how."""
        for engine in self._engines:
            engine.abort_soon(rids)

    def distrust(self, detail: str) -> None:
        """Find out which engine has other weights than it was pinned to."""
        task = asyncio.create_task(self._find(detail), name="router-suspects")
        self._suspects.add(task)
        task.add_done_callback(self._suspects.discard)

    # --- opening and closing ---------------------------------------------------------------------

    def look(self, campaign: Campaign | None) -> None:
        """Take in a change of the engines, or another point."""
        if campaign is not self._campaign:
            self._campaign, self._serving, self._was_open = campaign, set(), False
            self._close("the point has ended")
        if campaign is None:
            return
        serving = [engine for engine in self._engines if engine.serves(campaign.order)]
        names = {engine.name for engine in serving}
        lost, self._serving = self._serving - names, names
        if lost and self._open:
            log.warning("route_closed", lost=sorted(lost))
            # whichever of the requests wait for the lost engine, they would wait for long
            self._close("an engine behind the router was lost")
        if not self._open and names and (self._was_open or len(names) == len(self._engines)):
            self._wanted.set()

    def _close(self, why: str) -> None:
        self._open = False
        self._wanted.clear()
        if self._api is not None:
            self.abort_soon(self._api.cut(why))

    async def run(self) -> None:
        """Probe the route whenever that is wanted, until cancelled."""
        api = self._api = EngineAPI(self._url, self._api_key, limit=self._most(None))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._limit.run(self._loads), name="limit:router")
                while True:
                    await self._wanted.wait()
                    self._wanted.clear()
                    campaign = self._campaign
                    if campaign is not None and not self._open:
                        await self._probe(api, campaign)
        finally:
            for task in self._suspects:
                task.cancel()
            self._api = None
            await api.close()

    def _most(self, each: int | None) -> int:
        return (each or MOST) * max(1, len(self._engines))

    async def _loads(self) -> dict[str, Any]:
        """Add up what the engines say of their loads; those that are down say nothing."""
        asked = [(engine, engine.api) for engine in self._engines if engine.api is not None]
        answers = await asyncio.gather(*[api.loads() for _, api in asked])
        for (engine, _), answer in zip(asked, answers, strict=True):
            # their own looks see nothing in flight
            engine.limit.meter.note_load(read_load(answer))
        return {"loads": [rank for answer in answers for rank in answer.get("loads") or []]}

    async def _probe(self, api: EngineAPI, campaign: Campaign) -> None:
        """Ask for one token until it comes from the point's weights."""
        trouble = "no answer"
        number = 0
        try:
            async with asyncio.timeout(self._route_timeout_s):
                while self._campaign is campaign and not campaign.closed:
                    number += 1
                    trouble = await self._once(api, campaign, number)
                    if not trouble:
                        self._limit.learn(total(engine.limit.size for engine in self._engines))
                        self._open = self._was_open = True
                        log.info("route_open", probes=number)
                        self._changes.notify()
                        self._on_grown()
                        return
                    await asyncio.sleep(ROUTE_POLL_S)
        except TimeoutError:
            campaign.fail(
                Unhealthy(
                    f"the router at {self._url} did not answer from the point's weights within "
                    f"{self._route_timeout_s:g} s; the last probe: {trouble}"
                )
            )
            self._changes.notify()

    async def _once(self, api: EngineAPI, campaign: Campaign, number: int) -> str:
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        rid = f"route/{id(campaign):x}/{number}/"
        try:
            [answer] = await api.generate(
                [CANARY_IDS], [sampling], [rid], timeout_s=min(ROUTE_PROBE_S, self._route_timeout_s)
            )
        except EngineError as error:
            return str(error)
        if not answer.versions or not answer.versions <= campaign.versions:
            return f"it was answered by {sorted(answer.versions)}"
        return ""

    async def _find(self, detail: str) -> None:
        """Distrust the engines whose label is no longer the one that they were pinned to."""
        guilty = False
        for engine in self._engines:
            if engine.state is not State.SERVING:
                guilty = True  # being pinned again: its answers are not of the pin yet
                continue
            try:
                served = await served_version(engine.connected_api())
            except EngineError:
                continue  # its own supervision will see
            if engine.state is State.SERVING and served != engine.weight_version:
                engine.distrust(detail)
                guilty = True
        if not guilty:
            log.error(
                "foreign_engine_behind_router",
                detail=f"{detail}; no listed engine has such weights",
                hint="list every worker of the router in attached.urls",
            )
