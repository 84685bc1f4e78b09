"""Requests find an engine of their point's digest, and answers of other weights never count.

A sample that is being answered can be moved to another engine of the same digest: it is aborted,
what it has so far comes back, and the other engine goes on from there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import structlog

from evald.engines.answers import ABORTED, COMPLETE, Answer
from evald.engines.api import EngineBusy, EngineError, EngineRejected, EngineUnreachable
from evald.engines.engine import Engine
from evald.engines.state import State
from evald.errors import GenerationFailed, Unhealthy, VersionChanged
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation
from evald.postures.flights import Flight, Flights
from evald.postures.joining import Joiner
from evald.postures.lane import Lane
from evald.postures.progress import Progress
from evald.postures.taking import scored, starts, take_piece, take_whole

log = structlog.get_logger(__name__)

#: between two attempts on one request: doubles from the first to the last.
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 2.0
#: engines that die under one request before it has an engine to itself, and before it fails: a
#: question that kills servers must not cost the fleet, nor the questions beside it.
DEATHS_ALONE = 2
MAX_DEATHS = 3


class Router:
    """Sends each request to the least loaded lane that serves, and again until it is answered.

    ``loads``: evald loads the weights, so others can be got rid of; else they end the point.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        engines: Sequence[Engine],
        changes: Changes,
        *,
        alive_timeout_s: float,
        loads: bool,
    ) -> None:
        self._lanes = lanes
        self._engines = engines
        self._changes = changes
        self._alive_timeout_s = alive_timeout_s
        self._loads = loads
        self._flights = Flights()
        self._joiner = Joiner(lanes)

    # --- moving ----------------------------------------------------------------------------------

    def in_flight(self, campaign: Campaign, lane: Lane) -> int:
        """Count the samples that ``campaign`` has in flight on ``lane``."""
        return self._flights.samples(campaign, lane)

    def movable(self, campaign: Campaign, lane: Lane) -> bool:
        """Whether all of them can go on elsewhere."""
        there = self._flights.of(campaign, lane)
        return self._joiner.works and all(flight.movable for flight in there)

    def move(self, campaign: Campaign, lane: Lane) -> int:
        """Have what ``campaign`` has in flight on ``lane`` go on elsewhere; how many samples.

        They leave within a moment, each as soon as the server has answered the abort, and wait for
        room on another lane of the same order. What cannot be moved, or is being moved already,
        stays as it is.
        """
        there = self._flights.of(campaign, lane)
        moved = [flight for flight in there if flight.movable and not flight.moving]
        for flight in moved:
            flight.move()
        return sum(len(flight.rids) for flight in moved)

    # --- requests --------------------------------------------------------------------------------

    async def generate(self, campaign: Campaign, request: GenerateRequest) -> list[Generation]:
        """Fulfil ``Engines.generate`` for the point of ``campaign``."""
        progress = Progress(request)
        deadline = time.monotonic() + request.timeout_s
        at_once = True
        try:
            async with asyncio.timeout(request.timeout_s):
                while missing := progress.missing():
                    if not at_once:
                        wait_s = FIRST_RETRY_S * 2.0 ** min(progress.setbacks - 1, 10)
                        await asyncio.sleep(min(wait_s, MAX_RETRY_S))
                    progress.attempts += 1
                    lane, places = await self._admit(campaign, len(missing), progress)
                    progress.trouble = f"{lane.name} was still answering"
                    try:
                        at_once = await self._attempt(campaign, lane, progress, missing, deadline)
                    finally:
                        lane.slots.leave(places)
                    progress.setbacks += not at_once
        except TimeoutError as error:
            raise GenerationFailed(
                "timeout",
                f"no complete answer within {request.timeout_s:g} s after "
                f"{progress.attempts} attempts; last: {progress.trouble}",
            ) from error
        return progress.answers()

    async def _admit(self, campaign: Campaign, count: int, progress: Progress) -> tuple[Lane, int]:
        """Wait for a lane that serves and has room; the lane, and how many places were taken."""
        found = self._find_room(campaign, count, progress)
        if found is not None:
            return found
        campaign.line_up(count)
        try:
            while True:
                ticket = self._changes.ticket()
                found = self._find_room(campaign, count, progress)
                if found is not None:
                    return found
                await self._changes.wait(ticket, self._patience_s(campaign))
        finally:
            campaign.step_out(count)

    def _find_room(
        self, campaign: Campaign, count: int, progress: Progress
    ) -> tuple[Lane, int] | None:
        """Take places on the least loaded lane that serves and has room; None: there is none."""
        _raise_when_over(campaign)
        deaths = progress.deaths()
        if deaths >= MAX_DEATHS:
            raise GenerationFailed(
                "error", f"{deaths} engines died while they answered; last: {progress.trouble}"
            )
        found, least = None, (True, math.inf)
        for lane in self._lanes:
            slots = lane.slots
            # one that just failed this request is the last choice, not none
            load = (lane is progress.avoid, slots.in_flight / slots.limit)
            places = max(count, slots.limit) if deaths >= DEATHS_ALONE else count
            # (whether it serves takes the longest to find out)
            if load < least and slots.fits(places) and self._is_open(lane, campaign, progress):
                found, least = (lane, places), load
        if found is not None:
            lane, places = found
            lane.slots.enter(places)
        return found

    def _is_open(self, lane: Lane, campaign: Campaign, progress: Progress) -> bool:
        """Whether a lane serves; one that was freed of the request does only if no other does."""
        if not lane.serves(campaign.order):
            return False
        return lane is not progress.left or self._serving(campaign) == [lane]

    def _patience_s(self, campaign: Campaign) -> float:
        """Tell how long to wait for a change; raises Unhealthy where none is to be hoped for."""
        wait_s = self._alive_timeout_s
        if not self._serving(campaign):
            wait_s -= time.monotonic() - (campaign.down_since or time.monotonic())
            self._give_up_when_hopeless(campaign, wait_s)
        return wait_s

    def _serving(self, campaign: Campaign) -> list[Lane]:
        return [lane for lane in self._lanes if lane.serves(campaign.order)]

    def _give_up_when_hopeless(self, campaign: Campaign, wait_s: float) -> None:
        if campaign.gone:
            raise Unhealthy(f"no engine serves the snapshot any more: {campaign.gone.detail}")
        if all(engine.state is State.QUARANTINED for engine in self._engines):
            raise Unhealthy("no engine serves the snapshot any more: all are quarantined")
        if wait_s <= 0:
            raise Unhealthy(
                f"no engine has served the snapshot for {self._alive_timeout_s:g} s; "
                "look into the engines' logs"
            )

    async def _attempt(
        self,
        campaign: Campaign,
        lane: Lane,
        progress: Progress,
        missing: list[int],
        deadline: float,
    ) -> bool:
        """Ask one lane for what is missing; fills in what it answered.

        Returns whether all that is still missing was moved away from there.
        """
        # SGLang aborts by prefix: the closing slash keeps sample 1 apart from sample 10
        rids = [f"{progress.request.rid}/{progress.attempts}/{number}/" for number in missing]
        movable = all(progress.samples[number].movable for number in missing)
        flight = Flight(campaign, lane, rids, movable=movable)
        began = time.monotonic()
        progress.avoid, progress.left = lane, None
        self._flights.begin(flight)
        try:
            raw = await self._send(lane, progress, missing, rids, max(deadline - began, 1.0))
        finally:
            self._flights.end(flight)
        if flight.moving:
            progress.left = lane
        if raw is None:
            return False
        # whoever asked may have given up the pin: its weights may be others by now
        _raise_when_over(campaign)
        good = [
            await self._take(flight, progress, number, rid, answer, began)
            for number, rid, answer in zip(missing, rids, raw, strict=True)
        ]
        return all(good)

    async def _send(
        self,
        lane: Lane,
        progress: Progress,
        missing: list[int],
        rids: list[str],
        timeout_s: float,
    ) -> list[Answer] | None:
        """Send one list request; None when there is no answer, but there may be one elsewhere."""
        wanted = [progress.samples[number] for number in missing]
        life, answered = lane.life, False
        try:
            raw = await lane.connected_api().generate(
                [one.input_ids for one in wanted],
                [one.parameters for one in wanted],
                rids,
                timeout_s=timeout_s,
                score_from=starts(progress.request, missing),
            )
            answered = True
        except EngineRejected as error:
            answered = True
            if not any(one.pieces for one in wanted):
                raise GenerationFailed("rejected", str(error)) from error
            # a prompt that is nearly as long as the context is refused, whatever is to come
            for one in wanted:
                one.start_again()
            progress.trouble = f"{lane.name}: {error}"
        except EngineUnreachable as error:
            if error.reached:
                progress.cut_off.add((lane, life))
            progress.trouble = f"{lane.name}: {error}"
        except EngineBusy as error:
            progress.trouble = f"{lane.name}: {error}"
        except EngineError as error:
            progress.failed(f"{lane.name}: {error}")
        else:
            return raw
        finally:
            if not answered:
                lane.abort_soon(rids)
        return None

    async def _take(
        self,
        flight: Flight,
        progress: Progress,
        number: int,
        rid: str,
        answer: Answer,
        began: float,
    ) -> bool:
        """Take in one answer, or a piece of one that is being moved; False for one that is void."""
        campaign, lane, wanted = flight.campaign, flight.lane, progress.samples[number]
        partial = flight.moving and answer.reason == ABORTED
        if partial and not answer.output_ids:
            return True  # it had not begun
        void = self._void(campaign, lane, answer, rid, partial=partial)
        if void:
            progress.trouble = f"{lane.name}: {void}"
            wanted.start_again()
            return False
        if partial:
            take_piece(lane, wanted, answer, began)
            return True
        try:
            logprobs = scored(progress.request, number, answer)
        except ValueError as error:
            progress.failed(f"{lane.name}: {error}")
            return False
        text: str | None = answer.text or ""
        if wanted.pieces:
            text = await self._joiner.text(campaign.order, lane, wanted, answer)
            _raise_when_over(campaign)
        if text is None:
            progress.trouble = f"{lane.name}: the pieces of the answer cannot be decoded"
            wanted.start_again()
            return False
        take_whole(lane, wanted, answer, text, began, logprobs)
        return True

    def _void(
        self, campaign: Campaign, lane: Lane, answer: Answer, rid: str, *, partial: bool
    ) -> str:
        """Say why an answer, or a piece of one, does not count; empty when it does."""
        if answer.meta_info.id not in {None, rid}:
            return f"the answer is to another request ({answer.meta_info.id!r})"
        versions = answer.versions
        foreign = bool(versions) and not versions <= campaign.versions
        if foreign and not self._loads:
            # also of an answer that was cut short: the weights are others now
            changed = VersionChanged(
                f"an answer of {lane.name} came from weights {sorted(versions)}, not from "
                f"{sorted(campaign.versions)}: somebody loaded others while the point ran"
            )
            campaign.fail(changed)
            self._changes.notify()
            raise changed
        if answer.reason not in COMPLETE and not partial:
            return f"the answer ended with {answer.reason!r}"
        if foreign or not versions:
            detail = f"an answer came from weights {sorted(versions)}, not of the pin"
            log.error("foreign_weights", engine=lane.name, versions=sorted(versions))
            lane.distrust(detail)
            return detail
        return ""


def _raise_when_over(campaign: Campaign) -> None:
    """Raise what has ended the point, if anything has."""
    if campaign.failure is not None:
        raise campaign.failure
    if campaign.closed:
        raise GenerationFailed("error", "the point has ended")
