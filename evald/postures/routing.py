"""Requests find an engine of their point's digest, and answers of other weights never count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from evald.engines.answers import COMPLETE, Answer
from evald.engines.api import (
    EngineAPI,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnreachable,
)
from evald.engines.engine import Engine, Order
from evald.engines.slots import Slots
from evald.engines.state import State
from evald.errors import GenerationFailed, Unhealthy, VersionChanged
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation

log = structlog.get_logger(__name__)

#: between two attempts on one request: doubles from the first to the last.
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 2.0
#: answers that are none (500, no JSON) before the request fails.
MAX_ERRORS = 3
#: engines that die under one request before it has an engine to itself, and before it fails: a
#: question that kills servers must not cost the fleet, nor the questions beside it.
DEATHS_ALONE = 2
MAX_DEATHS = 3


class Lane(Protocol):
    """Where requests can be sent: an engine, or somebody's router in front of all of them."""

    @property
    def name(self) -> str:
        """What to call it."""

    @property
    def slots(self) -> Slots:
        """What it has in flight, and may have."""

    def serves(self, order: Order) -> bool:
        """Whether it takes requests for ``order`` now."""

    def connected_api(self) -> EngineAPI:
        """Return its API; raises EngineUnreachable when there is none."""

    def credit(self, version: str, tokens: int, *, prompt_tokens: int) -> str:
        """Note a good answer of ``version``; returns the engine that it came from."""

    def abort_soon(self, rids: list[str]) -> None:
        """Abort requests whose answers nobody waits for any more."""

    @property
    def life(self) -> int:
        """Number of its process."""

    def is_dead(self, life: int) -> bool:
        """Whether that process has ended, or is ending."""

    def distrust(self, detail: str) -> None:
        """Take in that it answered with weights that nobody asked for."""


class _Progress(msgspec.Struct):
    """One request under way: its answers so far, and what went wrong last."""

    request: GenerateRequest
    answers: list[Generation | None]
    attempt: int = 0
    errors: int = 0
    trouble: str = "no engine was free"
    avoid: Lane | None = None
    #: lanes, with the number of their process, that were cut off while they answered.
    cut_off: set[tuple[Lane, int]] = msgspec.field(default_factory=set)

    def deaths(self) -> int:
        return sum(lane.is_dead(life) for lane, life in self.cut_off)

    def failed(self, trouble: str) -> None:
        """Take in an answer that is none; raises GenerationFailed for one too many."""
        self.trouble = trouble
        self.errors += 1
        if self.errors >= MAX_ERRORS:
            raise GenerationFailed("error", trouble)

    def missing(self) -> list[int]:
        return [number for number, answer in enumerate(self.answers) if answer is None]


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

    async def generate(self, campaign: Campaign, request: GenerateRequest) -> list[Generation]:
        """Fulfil ``Engines.generate`` for the point of ``campaign``."""
        progress = _Progress(request, [None] * len(request.sampling))
        deadline = time.monotonic() + request.timeout_s
        try:
            async with asyncio.timeout(request.timeout_s):
                while missing := progress.missing():
                    if progress.attempt:
                        wait_s = FIRST_RETRY_S * 2.0 ** min(progress.attempt - 1, 10)
                        await asyncio.sleep(min(wait_s, MAX_RETRY_S))
                    progress.attempt += 1
                    lane, places = await self._admit(campaign, len(missing), progress)
                    progress.trouble = f"{lane.name} was still answering"
                    try:
                        await self._attempt(campaign, lane, progress, missing, deadline)
                    finally:
                        lane.slots.leave(places)
        except TimeoutError as error:
            raise GenerationFailed(
                "timeout",
                f"no complete answer within {request.timeout_s:g} s after "
                f"{progress.attempt} attempts; last: {progress.trouble}",
            ) from error
        return [answer for answer in progress.answers if answer is not None]

    async def _admit(self, campaign: Campaign, count: int, progress: _Progress) -> tuple[Lane, int]:
        """Wait for a lane that serves and has room; the lane, and how many places were taken."""
        while True:
            ticket = self._changes.ticket()
            _raise_when_over(campaign)
            deaths = progress.deaths()
            if deaths >= MAX_DEATHS:
                raise GenerationFailed(
                    "error", f"{deaths} engines died while they answered; last: {progress.trouble}"
                )
            serving = [lane for lane in self._lanes if lane.serves(campaign.order)]
            # one that just failed this request is the last choice, not none
            serving.sort(key=lambda e: (e is progress.avoid, e.slots.in_flight / e.slots.limit))
            for lane in serving:
                places = max(count, lane.slots.limit) if deaths >= DEATHS_ALONE else count
                if lane.slots.fits(places):
                    lane.slots.enter(places)
                    return lane, places
            wait_s = self._alive_timeout_s
            if not serving:
                wait_s -= time.monotonic() - (campaign.down_since or time.monotonic())
                self._give_up_when_hopeless(campaign, wait_s)
            await self._changes.wait(ticket, wait_s)

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
        progress: _Progress,
        missing: list[int],
        deadline: float,
    ) -> None:
        """Ask one engine for what is missing; fills in what it answered."""
        request = progress.request
        # SGLang aborts by prefix: the closing slash keeps sample 1 apart from sample 10
        rids = [f"{request.rid}/{progress.attempt}/{number}/" for number in missing]
        began, life = time.monotonic(), lane.life
        progress.avoid = lane
        answered = False
        try:
            raw = await lane.connected_api().generate(
                [request.prompts[number] for number in missing],
                [request.sampling[number] for number in missing],
                rids,
                timeout_s=max(deadline - began, 1.0),
                score_from=_starts(request, missing),
            )
            answered = True
        except EngineRejected as error:
            answered = True
            raise GenerationFailed("rejected", str(error)) from error
        except EngineUnreachable as error:
            if error.reached:
                progress.cut_off.add((lane, life))
            progress.trouble = f"{lane.name}: {error}"
            return
        except EngineBusy as error:
            progress.trouble = f"{lane.name}: {error}"
            return
        except EngineError as error:
            progress.failed(f"{lane.name}: {error}")
            return
        finally:
            if not answered:
                lane.abort_soon(rids)
        # whoever asked may have given up the pin: its weights may be others by now
        _raise_when_over(campaign)
        latency_s = time.monotonic() - began
        for number, rid, answer in zip(missing, rids, raw, strict=True):
            void = self._void(campaign, lane, answer, rid)
            if void:
                progress.trouble = f"{lane.name}: {void}"
                continue
            try:
                scored = _scored(request, number, answer)
            except ValueError as error:
                progress.failed(f"{lane.name}: {error}")
                continue
            prompt_tokens = len(request.prompts[number])
            progress.answers[number] = _generation(answer, lane, latency_s, scored, prompt_tokens)

    def _void(self, campaign: Campaign, lane: Lane, answer: Answer, rid: str) -> str:
        """Say why an answer does not count; empty when it does."""
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
        if answer.reason not in COMPLETE:
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


def _starts(request: GenerateRequest, numbers: list[int]) -> list[int] | None:
    starts = request.score_from
    return None if starts is None else [starts[number] for number in numbers]


def _scored(request: GenerateRequest, number: int, answer: Answer) -> list[float]:
    """Log-probabilities of a prompt, if they were asked for; raises ValueError."""
    if request.score_from is None:
        return []
    return answer.prompt_logprobs(len(request.prompts[number]) - request.score_from[number])


def _generation(
    answer: Answer,
    lane: Lane,
    latency_s: float,
    prompt_logprobs: list[float],
    prompt_tokens: int,
) -> Generation:
    # a label of the pin, whichever of its spans it names
    version = answer.meta_info.weight_version or max(answer.versions)
    output_ids = answer.output_ids or []
    return Generation(
        output_ids=output_ids,
        text=answer.text or "",
        finish_reason=answer.reason or "",
        weight_version=version,
        engine=lane.credit(version, len(output_ids), prompt_tokens=prompt_tokens),
        latency_s=latency_s,
        prompt_logprobs=prompt_logprobs,
    )
