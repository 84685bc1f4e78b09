"""What decoding costs a fake engine: all that runs gets on together, and the more, the slower.

A step gives each running request one token and takes ``step_s * (1 + running / slots)``; at most
``slots`` run, the others wait in order. It is computed from event to event: a virtual clock counts
the tokens that a request would have got that has run from the beginning, so that the next end is
known, whoever comes or goes meanwhile. Nothing happens for a single token.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import NamedTuple

import msgspec

#: tokens that a request has got are whole but for what floating point has left of the last one.
_ROUNDING = 1e-6


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a fake engine decodes, and how long its responses are (tokens)."""

    #: one step with next to nothing in the batch, seconds; a full batch takes twice that.
    step_s: float
    #: requests that run at the same time.
    slots: int = 64
    #: nothing is decoded while a prompt is read: seconds for each of its tokens.
    prefill_token_s: float = 0.0
    #: the lengths of responses are log-normal; ``max_new_tokens`` caps them.
    median_tokens: float = 400.0
    p99_tokens: float = 8000.0
    #: tokens that the KV cache holds; it only shows in the load, nothing is ever thrown out.
    kv_tokens: int = 1 << 20

    def running_step_s(self, running: int) -> float:
        """Tell how long one step takes with so many requests in the batch."""
        return self.step_s * (1 + running / self.slots)


class Usage(msgspec.Struct, kw_only=True):
    """What an engine has done since it started; exact, seconds of the model's clock."""

    #: while anything ran.
    busy_s: float = 0.0
    #: the same, times how much ran.
    slot_s: float = 0.0
    #: generated, those of aborted requests included.
    tokens: int = 0
    completed: int = 0
    aborted: int = 0


class _Running(NamedTuple):
    began: float
    tokens: int
    prompt_tokens: int


class DecodeModel:
    """The requests of one engine. Pure: the caller tells the time, in seconds that only grow."""

    def __init__(self, decode: Decode, now_s: float = 0.0) -> None:
        self.decode = decode
        self.usage = Usage()
        self._now_s = now_s
        #: tokens that a request would have got by now that has run from the beginning.
        self._clock = 0.0
        #: seconds for which prompts are still being read.
        self._prefill_s = 0.0
        self._running: dict[int, _Running] = {}
        #: clock at the end, and which request; some of them have been aborted.
        self._ends: list[tuple[float, int]] = []
        #: tokens to generate, and of the prompt; the oldest first.
        self._waiting: dict[int, tuple[int, int]] = {}
        #: prompts of what runs, and where the clock stood when each began.
        self._prompt_tokens, self._began = 0, 0.0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def token_usage(self) -> float:
        """Used share of the KV cache, 0..1."""
        generated = len(self._running) * self._clock - self._began
        return min((self._prompt_tokens + generated) / self.decode.kv_tokens, 1.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are being generated each second."""
        running = len(self._running)
        return running / self.decode.running_step_s(running)

    def enter(self, key: int, tokens: int, prompt_tokens: int = 0) -> None:
        """Let a request begin that will generate ``tokens``, or wait; ``advance`` first."""
        self._waiting[key] = (tokens, prompt_tokens)
        self._admit()

    def abort(self, key: int) -> int:
        """End a request early; how many tokens it has got. ``advance`` first."""
        self.usage.aborted += 1
        if self._waiting.pop(key, None) is not None:
            return 0
        one = self._running[key]
        tokens = min(int(self._clock - one.began + _ROUNDING), one.tokens)
        self._leave(key, tokens)
        self._admit()
        return tokens

    def next_end_s(self) -> float | None:
        """Tell when the next request will have ended, if nothing changes; None: nothing runs."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        left = max(self._ends[0][0] - self._clock, 0.0)
        return self._now_s + self._prefill_s + left * self.decode.running_step_s(self.running)

    def advance(self, now_s: float) -> list[int]:
        """Decode until then; the requests that have ended, in order."""
        ended = []
        while (end_s := self.next_end_s()) is not None and end_s <= now_s:
            self._pass(end_s)
            # exactly, whatever the seconds have been rounded to
            self._clock, key = heapq.heappop(self._ends)
            ended.append(key)
            self.usage.completed += 1
            self._leave(key, self._running[key].tokens)
            self._admit()
        self._pass(max(now_s, self._now_s))
        return ended

    def _pass(self, now_s: float) -> None:
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if not self._running:
            self._prefill_s = 0.0
            return
        self.usage.busy_s += elapsed_s
        self.usage.slot_s += elapsed_s * self.running
        prefill_s = min(self._prefill_s, elapsed_s)
        self._prefill_s -= prefill_s
        self._clock += (elapsed_s - prefill_s) / self.decode.running_step_s(self.running)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.decode.slots:
            key = next(iter(self._waiting))
            tokens, prompt_tokens = self._waiting.pop(key)
            self._running[key] = _Running(self._clock, tokens, prompt_tokens)
            heapq.heappush(self._ends, (self._clock + tokens, key))
            self._prompt_tokens += prompt_tokens
            self._began += self._clock
            self._prefill_s += prompt_tokens * self.decode.prefill_token_s

    def _leave(self, key: int, tokens: int) -> None:
        one = self._running.pop(key)
        self.usage.tokens += tokens
        self._prompt_tokens -= one.prompt_tokens
        # (with nobody left there is nothing to sum up, rounding errors included)
        self._began = self._began - one.began if self._running else 0.0


class Decoder:
    """A model that runs in real time; use it within one event loop."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._model = DecodeModel(decode, time.monotonic())
        self._keys = itertools.count()
        #: what each request will have got: fewer tokens than it wanted if it was aborted.
        self._futures: dict[int, asyncio.Future[int]] = {}
        self._tokens: dict[int, int] = {}
        self._by_rid: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, rid: str, tokens: int, prompt_tokens: int = 0) -> int:
        """Generate ``tokens``; returns how many there are when it ends or is aborted."""
        key = next(self._keys)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._settle()
        self._futures[key], self._tokens[key], self._by_rid[rid] = future, tokens, key
        self._model.enter(key, tokens, prompt_tokens)
        self._set_timer()
        try:
            return await future
        finally:
            self._stop(key)
            if self._by_rid.get(rid) == key:
                del self._by_rid[rid]

    def abort(self, rid: str) -> None:
        """End a request now; one that is not there is no error."""
        key = self._by_rid.get(rid)
        if key is not None:
            self._stop(key)

    def model(self) -> DecodeModel:
        """Give the model as it is now, to be read."""
        self._settle()
        return self._model

    def _stop(self, key: int) -> None:
        """Abort a request if it has not ended."""
        self._settle()
        future = self._futures.pop(key, None)
        if future is not None:
            del self._tokens[key]
            tokens = self._model.abort(key)
            if not future.done():  # (its task may have been cancelled)
                future.set_result(tokens)
            self._set_timer()

    def _settle(self) -> None:
        """Take in what has ended by now."""
        for key in self._model.advance(time.monotonic()):
            future, tokens = self._futures.pop(key), self._tokens.pop(key)
            if not future.done():
                future.set_result(tokens)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end_s = self._model.next_end_s()
        delay_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
        self._timer = (
            None if delay_s is None else asyncio.get_running_loop().call_later(delay_s, self._due)
        )

    def _due(self) -> None:
        self._settle()
        self._set_timer()
