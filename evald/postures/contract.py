"""What a posture offers to the dispatcher and the evaluator, whoever owns the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec

from evald.status.view import EngineView


class PinTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that a point must be measured on."""

    run: str
    step: int
    digest: str
    directory: Path


class Pin(msgspec.Struct, kw_only=True):
    """Proof that engines serve a target."""

    target: PinTarget
    #: engine name -> weight version (``run:step:digest8:nonce``) it was verified with.
    weight_versions: dict[str, str]
    #: version of the serving software, for provenance; empty when it does not say.
    sglang_version: str = ""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one question: sent as one list request."""

    #: token ids of the prompt, already checked against the vocabulary.
    input_ids: list[int]
    #: SGLang sampling parameters, one dict for each sample.
    sampling: list[dict[str, Any]]
    #: unique, used to abort.
    rid: str
    #: deadline for the whole request, seconds.
    timeout_s: float


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, checked to come from weights of the requested digest."""

    output_ids: list[int]
    #: the server's own decoding of ``output_ids``.
    text: str
    #: ``"stop"`` or ``"length"``; an aborted answer never gets here.
    finish_reason: str
    weight_version: str
    engine: str
    latency_s: float


class Posture(Protocol):
    """The engines, seen from a point."""

    async def run(self) -> None:
        """Supervise until cancelled; leaves no process behind."""

    async def pin(self, target: PinTarget) -> Pin:
        """Load ``target`` and prove it; return when the first engine serves it.

        Raises PinViolation, Unhealthy or SnapshotGone. Engines that verify later join by themselves
        and show up in ``Pin.weight_versions``.
        """

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question, on engines of ``pin``'s digest only.

        Void answers (aborted, foreign version, transport errors, 429 and 503) are done again, on
        another engine where there is one, within ``request.timeout_s``. Raises GenerationFailed for
        the samples' own fault, and Unhealthy when no engine serves the digest any more.
        """

    async def unpin(self, pin: Pin) -> None:
        """End of the point: late answers can never count, engines may be pinned again."""

    def capacity(self) -> int:
        """Count samples worth having in flight over all engines right now (at least 1)."""

    def engines(self) -> list[EngineView]:
        """State of each engine for status and records."""
