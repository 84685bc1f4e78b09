"""Grader ``remote``: a service that is asked over HTTP; here, what is sent and what may come."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

import msgspec

from evald.config_types import Count, Positive, Seconds, Table, Text
from evald.evals.graders.contract import Grade, GraderFailed, Rules, Sample
from evald.evals.graders.external import AnyLabel, version_text
from evald.evals.graders.verdict import SCORE, verdict


class RemoteSettings(Table, frozen=True, kw_only=True):
    """Where the service is, and how it is asked."""

    #: ``http://`` or ``https://``.
    url: Annotated[
        str, msgspec.Meta(pattern=r"^https?://[^/\s]+", description="a URL, http://host:port/path")
    ]
    #: key of the score in an object that the service answers.
    reward_key: Text = SCORE
    #: name of the environment variable whose value is sent as a bearer token.
    token_env: Text | None = None
    #: answers in one request; 1: each request is one object, more: a list of at most so many.
    batch: Positive = 1
    #: how long an answer waits for others to fill a batch.
    batch_wait_s: Seconds = 0.1
    #: requests under way at a time.
    concurrency: Positive = 16
    #: further tries after a request that did not get through (no connection, 429, 503).
    retries: Count = 3
    #: change it when the service would score differently.
    version: str = ""


class Remote(AnyLabel):
    """POSTs JSON and takes the score from the answer; understands what miles calls ``remote_rm``.

    One object for each answer: ``{"prompt", "response", "label"}``, and "metadata" where the set
    has a ``metadata_key``. "response" is the answer (behind the thinking, without the box of
    ``boxed_remote``). With ``batch`` above 1 the body is a list of those objects, and the service
    answers with a list of the same length and order. An answer is a number, true or false, or an
    object with the score at ``reward_key`` (see ``verdict``).

    Tried again: no connection, a connection that broke, 429 and 503. Any other status is a
    ``grader_error``, and so is whatever takes longer than ``grader_timeout_s``, tries and pauses
    between them included.
    """

    VERSION = 1

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, RemoteSettings)

    @cached_property
    def settings(self) -> RemoteSettings:
        """The settings, checked before."""
        return msgspec.convert(self.rules.config, RemoteSettings)

    def version(self) -> str:
        """Service and key; what the service does, evald cannot know."""
        settings = self.settings
        return version_text(self.VERSION, settings.url, settings.reward_key, settings.version)

    def grade(self, sample: Sample) -> Grade:
        """Not here: ``remote_grading`` asks."""
        raise GraderFailed(
            f"cannot grade question {sample.question!r} here: grader 'remote' is asked over HTTP"
        )


def request(settings: RemoteSettings, samples: list[Sample]) -> bytes:
    """Body for some samples: one object, or a list where batches are wanted."""
    bodies = [_body(sample) for sample in samples]
    return msgspec.json.encode(bodies if settings.batch > 1 else bodies[0])


def _body(sample: Sample) -> dict[str, Any]:
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    if sample.metadata is not None:
        body["metadata"] = sample.metadata
    return body


def read_verdicts(
    settings: RemoteSettings, content: bytes, count: int
) -> list[Grade | GraderFailed]:
    """Read the answers to ``count`` samples; raises GraderFailed when there are none at all."""
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraderFailed(f"{settings.url} did not answer with JSON: {error}") from error
    if settings.batch == 1:
        answer = [answer]
    if not isinstance(answer, list) or len(answer) != count:
        got = f"a list of {len(answer)}" if isinstance(answer, list) else "no list"
        raise GraderFailed(f"{settings.url} was sent {count} answers to grade, and gave {got}")
    return [_verdict(settings, one) for one in answer]


def _verdict(settings: RemoteSettings, answer: Any) -> Grade | GraderFailed:
    try:
        return verdict(answer, score_key=settings.reward_key)
    except GraderFailed as failed:
        return GraderFailed(f"{settings.url}: {failed}")
