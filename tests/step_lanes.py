"""Lanes that decode step by step, when a test says so, and end aborted answers as SGLang does."""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from evald.engines.answers import Answer, FinishReason, MetaInfo
from evald.engines.api import EngineError, EngineRejected, EngineUnreachable
from evald.engines.engine import Order
from evald.engines.slots import Slots
from evald.point import PinTarget
from evald.postures.campaign import Campaign
from evald.postures.changes import Changes
from evald.postures.contract import GenerateRequest, Generation
from evald.postures.routing import Router

#: tokens are bytes, and these: one ends an answer, the other a prompt.
STOP, BEGIN = 256, 257
WORDS = "“so — let us see” … ".encode()
LIMIT = 200


def response_to(prompt: list[int], limit: int = LIMIT) -> list[int]:
    """What every lane answers, as long as nobody interrupts it."""
    length = xxhash.xxh3_64_intdigest(bytes(prompt[:-1])) % 90
    words = list((WORDS * 9)[length % 7 :][:length])
    return [*words, STOP][:limit]


def text_of(ids: list[int]) -> str:
    """Decode; half a character becomes a replacement character."""
    said = b"".join(b"<stop>" if one == STOP else bytes([one]) for one in ids if one != BEGIN)
    return said.decode(errors="replace")


class Running:
    """One sample that a lane answers."""

    def __init__(self, prompt: list[int], sampling: dict[str, Any]) -> None:
        at = prompt.index(BEGIN) + 1
        self.ids: list[int] = []
        self.reason = ""
        self._context = prompt[-5:]
        self._limit: int = sampling["max_new_tokens"]
        self._coming = response_to(prompt[:at])[len(prompt) - at :]
        assert self._limit > 0

    def step(self) -> None:
        if not self.reason:
            self._grow()
            if self.ids[-1] == STOP:
                self.reason = "stop"
            elif len(self.ids) == self._limit:
                self.reason = "length"

    def abort(self) -> None:
        """Take one more token, and do not look at it."""
        if not self.reason:
            if self.ids:
                self._grow()
            self.reason = "abort"

    def answer(self, rid: str, version: str | None) -> Answer:
        matched = STOP if self.reason == "stop" else None
        shown = self.ids[:-1] if matched else self.ids
        text = text_of(self._context + shown)[len(text_of(self._context)) :]
        return Answer(
            meta_info=MetaInfo(
                id=rid, finish_reason=FinishReason(self.reason, matched), weight_version=version
            ),
            text=text,
            output_ids=list(self.ids),
        )

    def _grow(self) -> None:
        # (behind its end a model writes nonsense)
        self.ids.append(self._coming[len(self.ids)] if len(self.ids) < len(self._coming) else 33)


class StepLane:
    """Fulfils ``Lane`` and ``LaneAPI``."""

    def __init__(self, name: str, order: Order, changes: Changes, *, limit: int = 64) -> None:
        self.name = name
        self.order: Order | None = order
        self.version: str | None = f"version-{name}"
        self.slots = Slots(limit, changes.notify)
        self.life = 1
        self.distrusted = ""
        self.running: dict[str, Running] = {}
        #: aborts that come too early to be heard.
        self.deaf = 0
        #: prompts longer than that are refused.
        self.longest = 10**6
        #: what decoding ends in; None: it works.
        self.mute: EngineError | None = None
        self.asked: list[list[int]] = []
        #: aborts, heard or not.
        self.aborts = 0
        self.answers = self.tokens = self.prompt_tokens = 0
        self._changes = changes
        self._dead = asyncio.Event()
        self._moved_on = asyncio.Event()

    # --- Lane ------------------------------------------------------------------------------------

    def serves(self, order: Order) -> bool:
        return self.order is order

    def connected_api(self) -> StepLane:
        return self

    def credit(self, version: str, tokens: int, *, prompt_tokens: int, whole: bool = True) -> str:
        assert version == self.version
        self.answers += whole
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens
        return self.name

    def abort_soon(self, rids: list[str]) -> None:
        self.aborts += 1
        for rid in rids:
            if self.deaf:
                self.deaf -= 1
            elif rid in self.running:
                self.running[rid].abort()
        self._tell()

    def is_dead(self, life: int) -> bool:
        return life != self.life

    def distrust(self, detail: str) -> None:
        self.distrusted = detail

    # --- LaneAPI ---------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: list[list[int]],
        sampling: list[dict[str, Any]],
        rids: list[str],
        *,
        timeout_s: float,
        score_from: list[int] | None = None,
    ) -> list[Answer]:
        del score_from
        self.asked += input_ids
        if max(map(len, input_ids)) > self.longest:
            raise EngineRejected("too long")
        mine = {
            rid: Running(prompt, parameters)
            for rid, prompt, parameters in zip(rids, input_ids, sampling, strict=True)
        }
        self.running |= mine
        life = self.life
        try:
            async with asyncio.timeout(timeout_s):
                while not all(one.reason for one in mine.values()):
                    await self._moved_on.wait()
                    if self.life != life:
                        raise EngineUnreachable("connection reset")
            return [one.answer(rid, self.version) for rid, one in mine.items()]
        finally:
            for rid in rids:
                del self.running[rid]

    async def detokenize(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        if self.mute:
            raise self.mute
        return [text_of(one) for one in ids]

    # --- what tests do ---------------------------------------------------------------------------

    def step(self, tokens: int = 1) -> None:
        for one in self.running.values():
            for _ in range(tokens):
                one.step()
        self._tell()

    def die(self) -> None:
        """Answer nothing more, and come back empty."""
        self.life += 1
        self._tell()

    def give(self, order: Order | None) -> None:
        """Serve something else, or this again."""
        self.order = order
        self._changes.notify()

    def _tell(self) -> None:
        event, self._moved_on = self._moved_on, asyncio.Event()
        event.set()


class World:
    """A router, its lanes, and one point that they serve."""

    def __init__(self, lanes: int, *, limit: int = 64) -> None:
        target = PinTarget(run="demo", step=1, digest="d" * 32, directory=None)
        self.campaign = Campaign(target, attempts=2, scouting=False)
        self.order = self.campaign.order
        changes = Changes()
        self.lanes = [StepLane(f"e{i}", self.order, changes, limit=limit) for i in range(lanes)]
        self.campaign.versions |= {lane.version for lane in self.lanes if lane.version}
        self.router = Router(self.lanes, [], changes, alive_timeout_s=60.0, loads=True)
        self.tasks: list[asyncio.Task[list[Generation]]] = []

    def ask(self, *prompts: bytes, **sampling: Any) -> asyncio.Task[list[Generation]]:
        """Send one list request."""
        request = GenerateRequest(
            prompts=[[*prompt, BEGIN] for prompt in prompts],
            sampling=[{"max_new_tokens": LIMIT, "temperature": 0.0} | sampling] * len(prompts),
            rid=f"q{len(self.tasks)}",
            timeout_s=60.0,
        )
        task = asyncio.create_task(self.router.generate(self.campaign, request))
        self.tasks.append(task)
        return task

    async def settle(self) -> None:
        """Let everybody who can do something do it."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def step(self, tokens: int = 1) -> None:
        for lane in self.lanes:
            lane.step(tokens)
        await self.settle()

    async def move(self, lane: StepLane) -> int:
        moved = self.router.move(self.campaign, lane)
        await self.settle()
        return moved

    async def finish(self) -> list[Generation]:
        """Decode until every answer is there; all of them, in order."""
        async with asyncio.timeout(30):
            while not all(task.done() for task in self.tasks):
                await self.step(50)
                await asyncio.sleep(0.001)
        return [one for task in self.tasks for one in task.result()]

    def in_flight(self) -> list[int]:
        return [self.router.in_flight(self.campaign, lane) for lane in self.lanes]


def is_right(answer: Generation, prompt: bytes, limit: int = LIMIT) -> bool:
    """Whether an answer is what one lane alone would have given."""
    ids = response_to([*prompt, BEGIN], limit)
    tokens = sum(piece.tokens for piece in answer.pieces)
    return (
        answer.output_ids == ids
        and answer.text == text_of(ids[:-1] if ids[-1] == STOP else ids)
        and answer.finish_reason == ("stop" if ids[-1] == STOP else "length")
        and (
            not answer.pieces or (tokens == len(ids) and answer.pieces[-1].engine == answer.engine)
        )
    )
