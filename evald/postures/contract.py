"""What a posture hands over, and what those that have engines let a point ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from evald.point import PinTarget
from evald.pulse import Pulse
from evald.results.records import Counts
from evald.results.samples import Piece
from evald.status.view import EngineView


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One eval set of a point."""

    name: str
    counts: Counts
    seconds: float
    #: flat, with their full names ("eval/aime/stderr").
    metrics: dict[str, float]
    #: fewer samples have a score than the set's config asks for.
    too_few: bool = False


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """All eval sets of a point."""

    counts: Counts
    metrics: dict[str, float]
    #: engines that answered, and the weight versions of the answers.
    engines: list[str]
    weight_versions: list[str]
    provenance: dict[str, Any]
    #: what went wrong with the first sample that has no score, in words.
    problem: str = ""
    #: names of sets that are not what earlier points of the run were measured with.
    curve_breaks: list[str] = []


class Stages(Protocol):
    """What a posture tells while it measures a point."""

    def state(self, state: str) -> None:
        """Tell that a stage begins: "pinning" or "evaluating"."""

    def set_begins(self, name: str) -> float:
        """Tell that an eval set begins; returns its seconds in earlier lives of the daemon."""

    async def set_done(self, result: SetResult) -> None:
        """Hand over one eval set; returns once its record is written."""

    async def check_unchanged(self) -> None:
        """Raise Superseded or SnapshotGone when the directory is no longer what was accepted."""

    def spare(self) -> None:
        """Tell that the next point may begin beside this one."""


class Pin(msgspec.Struct, kw_only=True):
    """Proof that engines serve a target."""

    target: PinTarget
    #: engine name -> weight version (``run:step:digest8:nonce``) it was verified with.
    weight_versions: dict[str, str]
    #: version of the serving software, for provenance; empty when it does not say.
    sglang_version: str = ""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is asked about one question: sent as one list request."""

    #: token ids of each prompt, already checked against the vocabulary; one for each answer.
    prompts: list[list[int]]
    #: SGLang sampling parameters, one dict for each answer.
    sampling: list[dict[str, Any]]
    #: for each prompt the first token (from 1) whose log-probability is wanted; None: of none.
    score_from: list[int] | None = None
    #: unique, used to abort.
    rid: str
    #: deadline for the whole request, seconds.
    timeout_s: float


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, checked to come from weights of the requested digest."""

    output_ids: list[int]
    #: a server's own decoding of ``output_ids``.
    text: str
    #: ``"stop"`` or ``"length"``; an aborted answer never gets here.
    finish_reason: str
    weight_version: str
    engine: str
    latency_s: float
    #: natural-log probability of each prompt token from ``score_from`` on; empty if not asked for.
    prompt_logprobs: list[float] = []
    #: of an answer that was moved from engine to engine: what each has given, in order.
    pieces: tuple[Piece, ...] = ()


class Engines(Protocol):
    """The engines of a posture, seen from its points: each has a pin of its own."""

    async def run(self) -> None:
        """Supervise until cancelled; leaves no process behind."""

    async def pin(self, target: PinTarget) -> Pin:
        """Load ``target`` and prove it, or verify that it is there already.

        Returns when enough engines serve it (a fleet: one). Raises PinViolation, Unhealthy,
        SnapshotGone or VersionChanged. Engines that verify later join by themselves and show up in
        ``Pin.weight_versions``.
        """

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        """Answer one question, on engines of ``pin`` only.

        Void answers (aborted, foreign version, transport errors, 429 and 503) are done again, on
        another engine where there is one, within ``request.timeout_s``. Raises GenerationFailed for
        the samples' own fault, Unhealthy when no engine serves the pin any more, and VersionChanged
        where evald does not own the weights and they have become others.
        """

    async def confirm(self, pin: Pin) -> None:
        """After the last answer: raise VersionChanged when the weights did not stay the same."""

    async def unpin(self, pin: Pin) -> None:
        """End of the point: late answers can never count, engines may be pinned again."""

    async def restart(self, engine: str) -> None:
        """Restart an engine on an operator's word; raises EvaldError (no such engine)."""

    async def release(self, engine: str) -> None:
        """Release an engine from quarantine; raises EvaldError (not in quarantine)."""

    def capacity(self, pin: Pin) -> int:
        """Count the samples worth having in flight on engines of ``pin`` now (at least 1)."""

    def when_room(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call whenever the capacity may have grown, until the point's end."""

    def left(self, pin: Pin, samples: int) -> None:
        """Tell how many samples have no answer, since all are handed over; again with each answer.

        Engines that the point has no more use for can go to the next one. 0: all of them can.
        """

    def when_spare(self, pin: Pin, call: Callable[[], None]) -> None:
        """Call as soon as an engine is to be had beyond this point: the next may be pinned."""

    def engines(self) -> list[EngineView]:
        """State of each engine for status and records."""

    def pulses(self) -> list[Pulse]:
        """Pulse of each task that must get on."""
