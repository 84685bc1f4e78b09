from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from evald.evals import remote_grading
from evald.evals.graders import Grade, GraderFailed, Rules, Sample
from evald.evals.grading import Grading
from evald.evals.worker_pool import WorkerPool

Answer = Callable[[Any], Awaitable[web.Response] | web.Response]


class Service:
    """A grading service that answers what it is told to."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Answer = lambda _body: web.json_response({"score": 1})
        #: statuses of the next requests, before it answers; 0: the connection is cut.
        self.trouble: list[int] = []
        self.running = 0
        self.peak = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self.trouble:
                status = self.trouble.pop(0)
                if not status and request.transport is not None:
                    request.transport.abort()
                headers = {"Location": self.url}
                return web.Response(status=status or 500, text="not\nnow", headers=headers)
            answer = self.answer(self.bodies[-1])
            return answer if isinstance(answer, web.Response) else await answer
        finally:
            self.running -= 1


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    app = web.Application()
    app.router.add_post("/rm", service.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    service.url = f"http://{host}:{port}/rm"
    yield service
    await runner.cleanup()


@pytest.fixture
async def grading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Grading]:
    monkeypatch.setattr(remote_grading, "_PAUSE_S", 0.01)
    grading = Grading(WorkerPool(), environ={"JUDGE_TOKEN": "s3cret"})
    yield grading
    await grading.close()


def rules(service: Service, grader: str = "remote", **config: Any) -> Rules:
    return Rules(grader, config={"url": service.url, **config})


def sample(response: str = "r", **more: Any) -> Sample:
    return Sample(**{"response": response, "label": "l", "prompt": "p", "question": "q", **more})


async def failure(grading: Grading, rules: Rules, *, timeout_s: float = 20) -> str:
    with pytest.raises(GraderFailed) as caught:
        await grading.grade(rules, sample(), timeout_s=timeout_s)
    return str(caught.value)


async def test_a_service_made_for_miles_grades(service: Service, grading: Grading) -> None:
    service.answer = lambda body: web.json_response(float(body["response"] == body["label"]))
    assert await grading.grade(rules(service), sample("l"), timeout_s=20) == Grade(
        1.0, reason="answer: -"
    )
    assert service.bodies == [{"prompt": "p", "response": "l", "label": "l"}]
    service.answer = lambda _body: web.json_response({"score": -1.0, "acc": True})
    grade = await grading.grade(rules(service, reward_key="acc"), sample("x"), timeout_s=20)
    assert grade.score == 1.0


async def test_boxes_and_thinking_are_taken_off_before_it_is_asked(
    service: Service, grading: Grading
) -> None:
    boxed = rules(service, "boxed_remote")
    thought = sample("<think>\\boxed{1}</think>\\boxed{2}", metadata={"a": "\u00e9"}, label=None)
    await grading.grade(boxed, thought, timeout_s=20)
    assert service.bodies == [
        {"prompt": "p", "response": "2", "label": None, "metadata": {"a": "\u00e9"}}
    ]
    assert (await grading.grade(boxed, sample("<think>"), timeout_s=20)).unfinished_thinking
    assert (await grading.grade(boxed, sample("no box"), timeout_s=20)).no_answer
    assert len(service.bodies) == 1


async def test_the_token_goes_into_a_header_and_nowhere_else(
    service: Service, grading: Grading
) -> None:
    await grading.grade(rules(service), sample(), timeout_s=20)
    assert "Authorization" not in service.headers[0]
    name = "JUDGE_TOKEN"
    with_token = rules(service, token_env=name)
    await grading.grade(with_token, sample(), timeout_s=20)
    assert service.headers[1]["Authorization"] == "Bearer s3cret"
    service.trouble = [401]
    assert "s3cret" not in await failure(grading, with_token)


async def test_answers_go_in_batches_that_do_not_wait_for_ever(
    service: Service, grading: Grading
) -> None:
    service.answer = lambda body: web.json_response(
        [{"score": float(one["response"])} if one["response"] != "3" else {} for one in body]
    )
    batched = rules(service, batch=4, batch_wait_s=0.2)
    grades = await asyncio.gather(
        *(grading.grade(batched, sample(str(n)), timeout_s=20) for n in range(10)),
        return_exceptions=True,
    )
    assert [grade.score for grade in grades if isinstance(grade, Grade)] == [
        0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0,
    ]  # fmt: skip
    # one bad answer costs its own sample
    assert "has no 'score'" in str(grades[3])
    assert [len(body) for body in service.bodies] == [4, 4, 2]


async def test_a_busy_service_is_asked_again(service: Service, grading: Grading) -> None:
    service.trouble = [503, 0, 429]
    assert (await grading.grade(rules(service), sample(), timeout_s=20)).score == 1.0
    assert len(service.bodies) == 4


@pytest.mark.parametrize(
    ("trouble", "requests", "sentence"),
    [
        ([503] * 9, 3, "could not be asked in 3 tries: HTTP 503: not now"),
        ([0] * 9, 3, "could not be asked in 3 tries: "),
        ([500], 1, "/rm: HTTP 500: not now"),
        ([404], 1, "/rm: HTTP 404: not now"),
        ([307], 1, "/rm: HTTP 307: not now"),
    ],
)
async def test_tries_are_counted_and_other_answers_stand(
    service: Service, grading: Grading, trouble: list[int], requests: int, sentence: str
) -> None:
    service.trouble = trouble
    assert sentence in await failure(grading, rules(service, retries=2))
    assert len(service.bodies) == requests


async def test_a_service_that_is_not_there_is_a_grader_error(grading: Grading) -> None:
    nowhere = Rules("remote", config={"url": "http://127.0.0.1:1/rm", "retries": 1})
    assert "could not be asked in 2 tries: " in await failure(grading, nowhere)


async def test_the_deadline_covers_all_tries(service: Service, grading: Grading) -> None:
    service.answer = hang
    assert await failure(grading, rules(service), timeout_s=0.3) == (
        f"cannot grade: {service.url} did not answer within 0.3 s; raise grader_timeout_s if it "
        "needs longer"
    )
    service.trouble = [503] * 1000
    assert "did not answer within" in await failure(
        grading, rules(service, retries=10_000), timeout_s=0.3
    )
    assert len(service.bodies) < 20


async def hang(_body: Any) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_requests_stay_within_the_concurrency(service: Service, grading: Grading) -> None:
    async def slow(_body: Any) -> web.Response:
        await asyncio.sleep(0.1)
        return web.json_response(1)

    service.answer = slow
    few = rules(service, concurrency=2)
    # (no deadline runs before its request has its turn)
    await asyncio.gather(*(grading.grade(few, sample(), timeout_s=0.5) for _ in range(16)))
    assert service.peak == 2


async def test_answers_that_are_too_long_or_none_are_grader_errors(
    service: Service, grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_grading, "_MAX_ANSWER_BYTES", 1000)
    service.answer = lambda _body: web.Response(text=json.dumps("x" * 2000))
    assert "answers with more than 1000 bytes" in await failure(grading, rules(service))
    service.answer = lambda _body: web.Response(text="<html>")
    assert "did not answer with JSON" in await failure(grading, rules(service))


async def test_what_is_under_way_ends_with_the_point(service: Service, grading: Grading) -> None:
    service.answer = hang
    task = asyncio.create_task(grading.grade(rules(service), sample(), timeout_s=60))
    batched = rules(service, batch=8, batch_wait_s=30.0)
    waiting = asyncio.create_task(grading.grade(batched, sample(), timeout_s=60))
    async with asyncio.timeout(20):
        while not service.running:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(grading.close(), 5)
    with pytest.raises(GraderFailed, match="grading ends before the service was asked"):
        await waiting
