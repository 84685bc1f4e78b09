"""Requests find an engine of their point's digest, and answers of other weights never count."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from evald.engines.answers import COMPLETE, Answer
from evald.engines.api import EngineBusy, EngineError, EngineRejected, EngineUnreachable
from evald.engines.engine import Engine
from evald.engines.state import State
from evald.errors import GenerationFailed, Unhealthy
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


class _Progress(msgspec.Struct):
    """One request under way: its answers so far, and what went wrong last."""

    request: GenerateRequest
    answers: list[Generation | None]
    attempt: int = 0
    errors: int = 0
    trouble: str = "no engine was free"
    avoid: Engine | None = None
    #: engines, with the number of their process, that were cut off while they answered.
    cut_off: set[tuple[Engine, int]] = msgspec.field(default_factory=set)

    def deaths(self) -> int:
        return sum(engine.life != life or not engine.alive for engine, life in self.cut_off)

    def missing(self) -> list[int]:
        return [number for number, answer in enumerate(self.answers) if answer is None]


class Router:
    """Sends each request to the least loaded verified engine, and again until it is answered."""

    def __init__(self, engines: list[Engine], changes: Changes, *, alive_timeout_s: float) -> None:
        self._engines = engines
        self._changes = changes
        self._alive_timeout_s = alive_timeout_s

    async def generate(self, campaign: Campaign, request: GenerateRequest) -> list[Generation]:
        """Fulfil ``Posture.generate`` for the point of ``campaign``."""
        progress = _Progress(request, [None] * len(request.sampling))
        deadline = time.monotonic() + request.timeout_s
        try:
            async with asyncio.timeout(request.timeout_s):
                while missing := progress.missing():
                    if progress.attempt:
                        wait_s = FIRST_RETRY_S * 2.0 ** min(progress.attempt - 1, 10)
                        await asyncio.sleep(min(wait_s, MAX_RETRY_S))
                    progress.attempt += 1
                    engine, places = await self._admit(campaign, len(missing), progress)
                    try:
                        await self._attempt(campaign, engine, progress, missing, deadline)
                    finally:
                        engine.slots.leave(places)
        except TimeoutError as error:
            raise GenerationFailed(
                "timeout",
                f"no complete answer within {request.timeout_s:g} s after "
                f"{progress.attempt} attempts; last: {progress.trouble}",
            ) from error
        return [answer for answer in progress.answers if answer is not None]

    async def _admit(
        self, campaign: Campaign, count: int, progress: _Progress
    ) -> tuple[Engine, int]:
        """Wait for a verified engine with room; the engine, and how many places were taken."""
        while True:
            ticket = self._changes.ticket()
            if campaign.closed:
                raise GenerationFailed("error", "the point has ended")
            deaths = progress.deaths()
            if deaths >= MAX_DEATHS:
                raise GenerationFailed(
                    "error", f"{deaths} engines died while they answered; last: {progress.trouble}"
                )
            serving = [engine for engine in self._engines if engine.serves(campaign.order)]
            # an engine that just failed this request is the last choice, not none
            serving.sort(key=lambda e: (e is progress.avoid, e.slots.in_flight / e.slots.limit))
            for engine in serving:
                places = max(count, engine.slots.limit) if deaths >= DEATHS_ALONE else count
                if engine.slots.fits(places):
                    engine.slots.enter(places)
                    return engine, places
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
        engine: Engine,
        progress: _Progress,
        missing: list[int],
        deadline: float,
    ) -> None:
        """Ask one engine for what is missing; fills in what it answered."""
        request = progress.request
        # SGLang aborts by prefix: the closing slash keeps sample 1 apart from sample 10
        rids = [f"{request.rid}/{progress.attempt}/{number}/" for number in missing]
        began, life = time.monotonic(), engine.life
        progress.avoid = engine
        answered = False
        try:
            raw = await engine.connected_api().generate(
                [request.input_ids] * len(missing),
                [request.sampling[number] for number in missing],
                rids,
                timeout_s=max(deadline - began, 1.0),
            )
            answered = True
        except EngineRejected as error:
            answered = True
            raise GenerationFailed("rejected", str(error)) from error
        except EngineUnreachable as error:
            progress.cut_off.add((engine, life))
            progress.trouble = f"{engine.name}: {error}"
            return
        except EngineBusy as error:
            progress.trouble = f"{engine.name}: {error}"
            return
        except EngineError as error:
            progress.trouble = f"{engine.name}: {error}"
            progress.errors += 1
            if progress.errors >= MAX_ERRORS:
                raise GenerationFailed("error", progress.trouble) from error
            return
        finally:
            if not answered:
                engine.abort_soon(rids)
        engine.answered()
        if campaign.closed:
            # whoever asked has given up the pin: its weights may be others by now
            raise GenerationFailed("error", "the point has ended")
        latency_s = time.monotonic() - began
        for number, answer in zip(missing, raw, strict=True):
            void = self._void(campaign, engine, answer)
            if void:
                progress.trouble = f"{engine.name}: {void}"
            else:
                progress.answers[number] = _generation(answer, engine.name, latency_s)

    def _void(self, campaign: Campaign, engine: Engine, answer: Answer) -> str:
        """Say why an answer does not count; empty when it does."""
        if answer.reason not in COMPLETE:
            return f"the answer ended with {answer.reason!r}"
        versions = answer.versions
        if not versions or not versions <= campaign.versions:
            detail = f"an answer came from weights {sorted(versions)}, not of the pin"
            log.error("foreign_weights", engine=engine.name, versions=sorted(versions))
            engine.distrust(detail)
            return detail
        return ""


def _generation(answer: Answer, engine: str, latency_s: float) -> Generation:
    return Generation(
        output_ids=answer.output_ids or [],
        text=answer.text or "",
        finish_reason=answer.reason or "",
        # a label of the pin, whichever of its spans it names
        weight_version=answer.meta_info.weight_version or max(answer.versions),
        engine=engine,
        latency_s=latency_s,
    )
