"""The least that asks a server all of it: what evald's evaluation is measured against.

A closed loop over aiohttp: so many workers, each with one request under way, until there are none
left. No journal, no check of weights, no grading, no retry, no deadline. Goal: nobody asks faster.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from engine_server import Server

from evald.config import EvalSet
from evald.evals.kinds.generate import EncodedPrompt
from evald.evals.preparation import Preparation
from evald.evals.sampling import sampling_for
from evald.evals.sets import load_set
from evald.evals.token_ids import unpack


class Ask(NamedTuple):
    """One question to send: token ids, and one table of sampling parameters for each sample."""

    prompt: list[int]
    sampling: list[dict[str, Any]]


class Took(NamedTuple):
    """What came back, and how long all of it took."""

    answers: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds


class _Meta(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    meta_info: _Meta


_answers = msgspec.json.Decoder(list[_Answer])


def asks_of(eval_set: EvalSet, model: Path) -> list[Ask]:
    """Make the requests that evald makes of a set: the same token ids, the same parameters."""
    loaded = load_set(eval_set)
    samples = list(range(eval_set.n_samples_per_eval_prompt))
    asks = []
    encoded = Preparation([loaded], model).encode_base(loaded)
    for question, prompt in zip(loaded.questions, encoded, strict=True):
        if not isinstance(prompt, EncodedPrompt):
            raise SystemExit(f"question {question.id} cannot be asked: {prompt}")
        asks.append(Ask(unpack(prompt.ids), sampling_for(eval_set, question.id, samples)))
    return asks


async def ask_all(server: Server, asks: Sequence[Ask], *, in_flight: int, flush: bool) -> Took:
    """Send all of it, ``in_flight`` samples at a time; ``flush``: from an empty prefix cache.

    evald's point begins with an empty cache, too: a pin flushes it.
    """
    todo, counts = iter(enumerate(asks)), [0, 0]
    run = secrets.token_hex(4)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        server.url, connector=connector, headers=server.headers
    ) as session:
        if flush:
            async with session.post("/flush_cache") as response:
                response.raise_for_status()

        async def work() -> None:
            for number, ask in todo:
                n = len(ask.sampling)
                body = {
                    "input_ids": [ask.prompt] * n,
                    "sampling_params": ask.sampling,
                    "rid": [f"{run}-{number}-{sample}" for sample in range(n)],
                }
                async with session.post("/generate", data=msgspec.json.encode(body)) as response:
                    response.raise_for_status()
                    answers = _answers.decode(await response.read())
                counts[0] += len(answers)
                counts[1] += sum(answer.meta_info.completion_tokens for answer in answers)

        workers = max(1, in_flight // len(asks[0].sampling))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
        seconds = time.perf_counter() - began
    return Took(counts[0], counts[1], seconds)


async def best_in_flight(
    server: Server, asks: Sequence[Ask], candidates: Sequence[int], *, turns: int = 1
) -> tuple[int, dict[int, float]]:
    """Find how many in flight are the fastest; also tokens/s of each."""
    rates: dict[int, float] = {}
    for _ in range(turns):
        for in_flight in candidates:
            took = await ask_all(server, asks, in_flight=in_flight, flush=True)
            rates[in_flight] = max(rates.get(in_flight, 0.0), took.tokens_per_s)
    return max(rates, key=lambda in_flight: rates[in_flight]), rates
