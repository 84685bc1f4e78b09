"""An evaluator over toy sets, in front of engines that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from evald.config import Dispatch, Results
from evald.errors import EvaldError, Unhealthy
from evald.evals.curve import CurveWatch
from evald.evals.encoding import Encoding
from evald.evals.evaluator import Evaluator, PreparedPoint
from evald.evals.sets import load_set
from evald.evals.stats.set_metrics import Earlier
from evald.evals.worker import Job, answer
from evald.evals.worker_pool import WorkerFailed, Workers
from evald.point import EvalPoint, PinTarget, PointKey, Snapshot
from evald.postures.contract import GenerateRequest, Generation, Pin, PointResult, SetResult
from evald.pulse import Pulse
from evald.results.pause import Pause
from evald.status.view import EngineView, SetView

DIGEST = "0123456789abcdef"


LABEL = "r:7:01234567:n"


class FakePosture:
    """Answers with what ``reply`` says of the prompt's text; counts what is in flight."""

    def __init__(self, reply: Callable[[str], Awaitable[str] | str], *, capacity: int = 8) -> None:
        self.reply = reply
        self.requests: list[GenerateRequest] = []
        self.in_flight = 0
        self.peak = 0
        self.size = capacity
        self.wake: Callable[[], None] = lambda: None
        #: what it was told of samples without an answer.
        self.samples_left: list[int] = []
        self.finish_reason = "stop"
        #: characters of a token in its answers.
        self.token_chars = 1
        self.step = 7

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        assert pin.target.step == self.step
        self.requests.append(request)
        self.in_flight += len(request.sampling)
        self.peak = max(self.peak, self.in_flight)
        try:
            text = self.reply(text_of(request))
            if not isinstance(text, str):
                text = await text
            await asyncio.sleep(0)
        finally:
            self.in_flight -= len(request.sampling)
        return [
            Generation(
                output_ids=[1] * (len(text) // self.token_chars),
                text=text,
                finish_reason=self.finish_reason,
                weight_version=LABEL,
                engine="engine-0",
                latency_s=0.01,
                prompt_logprobs=[-1.0] * (len(prompt) - start),
            )
            for prompt, start in zip(
                request.prompts,
                request.score_from or [len(prompt) for prompt in request.prompts],
                strict=True,
            )
        ]

    def capacity(self, pin: Pin) -> int:
        assert pin.target.step == self.step
        return self.size

    def when_room(self, pin: Pin, call: Callable[[], None]) -> None:
        assert pin.target.step == self.step
        self.wake = call

    def left(self, pin: Pin, samples: int) -> None:
        assert pin.target.step == self.step
        self.samples_left.append(samples)

    def when_spare(self, pin: Pin, call: Callable[[], None]) -> None:
        del call  # no point comes behind
        assert pin.target.step == self.step

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def pin(self, target: PinTarget) -> Pin:
        return Pin(target=target, weight_versions={"engine-0": LABEL})

    async def unpin(self, pin: Pin) -> None:
        assert pin.target.step == self.step

    async def confirm(self, pin: Pin) -> None:
        assert pin.target.step == self.step

    async def restart(self, engine: str) -> None:
        raise EvaldError(engine)

    async def release(self, engine: str) -> None:
        raise EvaldError(engine)

    def engines(self) -> list[EngineView]:
        return []

    def pulses(self) -> list[Pulse]:
        return []


class InlineWorkers:
    """Does jobs at once, in this process."""

    async def run(self, job: Job, *, timeout_s: float) -> msgspec.Raw:
        assert timeout_s > 0
        reply = answer(job)
        if reply.failure is not None:
            raise WorkerFailed(reply.failure)
        return reply.result

    async def close(self) -> None:
        pass


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def text_of(request: GenerateRequest) -> str:
    """Undo the byte-level tokenizer of conftest for ASCII text."""
    return "".join(chr(33 + i) for i in request.prompts[0])


def rows_of(n: int, prefix: str = "q") -> list[dict[str, Any]]:
    """Give questions whose right answer is the prompt itself."""
    return [{"prompt": f"{prefix}{i}", "label": f"{prefix}{i}"} for i in range(n)]


class World:
    """An evaluator over toy sets, and what it reports."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.results_dir = tmp_path / "results"
        self.model = model
        self.sets: list[Any] = []
        self.done: list[SetResult] = []
        self.on_set_error: Exception | None = None
        self.sample_timeout_s = 600.0
        self.evaluator: Evaluator | None = None
        self.workers: Workers = InlineWorkers()
        self.curve: CurveWatch | None = None
        self.earlier: list[Earlier] = []
        self.pause = Pause()
        self.deterministic = False
        #: seconds that a set has had in earlier lives.
        self.used_s = 0.0

    def view(self) -> list[SetView]:
        """Progress of the point's sets."""
        return [] if self.evaluator is None else self.evaluator.view(PointKey("r", 7))

    async def on_set(self, result: SetResult) -> None:
        self.done.append(result)
        if self.on_set_error is not None:
            raise self.on_set_error

    async def prepared(self) -> tuple[Evaluator, PreparedPoint]:
        self.evaluator = Evaluator(
            [load_set(one) for one in self.sets],
            dispatch=Dispatch(sample_timeout_s=self.sample_timeout_s),
            results=Results(dir=str(self.results_dir)),
            model_dir=self.model,
            make_encoder=Encoding,
            workers=self.workers,
            curve=self.curve,
            earlier=lambda _key, _set: self.earlier,
            pause=self.pause,
            deterministic=self.deterministic,
        )
        snapshot = Snapshot(
            run="r", step=7, directory=self.model, fingerprint="f", size_bytes=1, digest=DIGEST
        )
        point = EvalPoint(PointKey("r", 7), snapshot)
        return self.evaluator, await self.evaluator.prepare(point)

    def target(self, digest: str = DIGEST) -> PinTarget:
        return PinTarget(run="r", step=7, digest=digest, directory=self.model)

    async def evaluate(
        self, posture: FakePosture, *, within_s: float | None = None, digest: str = DIGEST
    ) -> PointResult:
        evaluator, prepared = await self.prepared()
        deadline = None if within_s is None else asyncio.get_running_loop().time() + within_s
        try:
            return await evaluator.evaluate(
                prepared,
                await posture.pin(self.target(digest)),
                posture,
                on_set=self.on_set,
                set_begins=lambda _name: self.used_s,
                deadline=deadline,
            )
        finally:
            await evaluator.close()

    def journal(self, name: str) -> list[dict[str, Any]]:
        path = self.results_dir / "samples" / "r" / "step_7.r0" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


async def hang(_text: str) -> str:
    await asyncio.Event().wait()
    return ""


@contextmanager
def failing_on_cancel() -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        raise Unhealthy("engines stop") from None
