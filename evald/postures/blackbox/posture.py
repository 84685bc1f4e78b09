"""Posture [blackbox]: a snapshot's directory goes in, results come out of a process of its own."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from evald.config import Aggregate, BlackBox
from evald.errors import EvaldError, EvalSkip
from evald.evals.sets import LoadedSet
from evald.point import EvalPoint, PointKey, SkipReason
from evald.postures.blackbox.class_box import ClassBox
from evald.postures.blackbox.command_box import CommandBox
from evald.postures.blackbox.process import (
    NAME,
    Box,
    Request,
    Room,
    environment,
    new_output,
    reap,
)
from evald.postures.blackbox.results import BoxResults, BoxSet, ResultsRefused, read_results
from evald.postures.blackbox.samples import write_samples
from evald.postures.contract import PointResult, SetResult, Stages
from evald.pulse import Pulse
from evald.results.modes import Modes
from evald.results.pause import Pause
from evald.results.records import Counts
from evald.results.samples import SampleJournal, point_samples_dir
from evald.status.view import EngineView, SetView

log = structlog.get_logger(__name__)


class BlackBoxPosture:
    """Fulfils ``Posture``: points one after another, by a user's class or command.

    A class's process stays alive between points. ``results_dir`` gets ``blackbox/`` with a log for
    each process and an output directory for each attempt, and ``samples/``. ``environ`` is evald's
    own environment, of which the black box sees a part.
    """

    def __init__(
        self,
        config: BlackBox,
        *,
        results_dir: Path,
        modes: Modes,
        environ: Mapping[str, str],
        pause: Pause | None = None,
    ) -> None:
        self._config = config
        self._pause = pause or Pause()
        self._results_dir = results_dir
        self._modes = modes
        self._directory = results_dir / "blackbox"
        self._room = Room(config, environment(config, environ), self._directory)
        self._box: Box = (
            ClassBox(config, self._room)
            if config.command is None
            else CommandBox(config, self._room)
        )
        self._turn = asyncio.Lock()
        self._reaped = False
        self._state = "idle"
        self._detail = ""
        self._crashes = 0

    async def run(self) -> None:
        """Have the class ready before the first point; on cancellation leave no process behind."""
        try:
            async with self._turn:
                await self._reap()
                self._state = "starting"
                try:
                    await self._box.warm_up()
                except EvalSkip as skip:  # the first point tries again, and says so for good
                    self._box.leave()
                    self._detail = skip.detail
                    log.warning("blackbox_not_ready", reason=skip.reason, detail=skip.detail)
                self._state = "idle"
            await asyncio.Event().wait()
        finally:
            self._state = "stopped"
            self._box.leave()
            await self._room.empty()

    async def prepare(self, point: EvalPoint) -> None:
        """Prepare nothing: the black box reads the snapshot by itself."""

    async def measure(
        self,
        point: EvalPoint,
        prepared: None,  # noqa: ARG002 (the contract's)
        *,
        digest: str,
        deadline: float,
        stages: Stages,
    ) -> PointResult:
        """Let the black box measure; what it read must be what was hashed.

        ``deadline`` counts beside the configured timeout. Raises EvalSkip: with the reason of the
        black box itself, "deadline" or "crashed". Cancellation ends the process, and nothing
        counts.
        """
        stages.state("evaluating")
        async with self._turn:
            result = await self._evaluate(point, digest, deadline, stages)
        await stages.check_unchanged()
        return result

    def engines(self) -> list[EngineView]:
        """Show the black box as one engine."""
        process = self._room.process
        alive = process is not None and not process.exited.is_set()
        return [
            EngineView(
                name=NAME,
                state=self._state,
                in_flight=int(self._state == "evaluating"),
                restarts=self._crashes,
                pid=process.pid if process and alive else None,
                detail=self._detail,
            )
        ]

    async def restart(self, engine: str) -> None:
        """Refuse: each crash gets a fresh process anyway."""
        raise EvaldError(f"cannot restart {engine}: a black box has no engines of evald's")

    async def release(self, engine: str) -> None:
        """Refuse: nothing is ever quarantined."""
        raise EvaldError(f"cannot release {engine}: a black box has no engines of evald's")

    def progress(self, key: PointKey) -> list[SetView]:  # noqa: ARG002 (the contract's)
        """Show nothing: a black box tells its sets when it is done."""
        return []

    def pulses(self) -> list[Pulse]:
        """Have none: the process is looked after with the point that it measures."""
        return []

    async def use(self, sets: list[LoadedSet], aggregates: list[Aggregate]) -> None:
        """Ignore it: a black box has its own sets, and its config has none."""

    async def close(self) -> None:
        """Have nothing more to end."""

    async def _evaluate(
        self, point: EvalPoint, digest: str, deadline: float, stages: Stages
    ) -> PointResult:
        """Give one point to the black box, and take its results."""
        await self._reap()
        output_dir = await self._pause.insist(
            self._directory,
            lambda: asyncio.to_thread(
                new_output, self._directory, point.key, keep=self._config.keep_logs
            ),
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        limit = min(began_s + self._config.timeout_s, deadline)
        request = Request(point=point, digest=digest, output_dir=output_dir, limit=limit)
        try:
            await self._ask(request)
            results = await self._read(output_dir)
            return await self._take(results, request, loop.time() - began_s, stages)
        except EvalSkip as skip:
            if self._state == "stopped":
                # the daemon stops, which is not the point's end: it resumes
                raise asyncio.CancelledError from skip
            self._crashes += skip.reason == SkipReason.CRASHED
            self._detail = f"{point.key}: {skip.reason}: {skip.detail}"
            # nothing of a point is left when it has ended
            await self._room.empty()
            raise

    async def _reap(self) -> None:
        """Kill what a daemon that was killed together with its guards has left."""
        if not self._reaped:
            await asyncio.to_thread(reap, self._directory)
            self._reaped = True

    async def _ask(self, request: Request) -> None:
        """Let the black box write its results; raises EvalSkip when it has none.

        The process goes unless it has answered: whatever else ended the wait, it may hang, or hold
        what the next point needs.
        """
        self._state = "evaluating"
        answered = False
        try:
            async with asyncio.timeout_at(request.limit) as scope:
                skip = await self._box.ask(request)
            answered = True
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EvalSkip(
                f"it was not done in time (blackbox.timeout_s is {self._config.timeout_s:g}) and "
                "was killed",
                reason=SkipReason.DEADLINE,
            ) from error
        finally:
            if not answered:
                self._box.leave()
            if self._state != "stopped":
                self._state = "idle"
        if skip is not None:
            raise EvalSkip(skip.detail, reason=skip.reason)

    async def _read(self, output_dir: Path) -> BoxResults:
        try:
            results = await asyncio.to_thread(read_results, output_dir)
        except ResultsRefused as refused:
            raise EvalSkip(str(refused), reason=SkipReason.CRASHED) from refused
        if not isinstance(results, BoxResults):
            raise EvalSkip(results.detail, reason=results.reason)
        return results

    async def _take(
        self, results: BoxResults, request: Request, seconds: float, stages: Stages
    ) -> PointResult:
        """Write samples, report sets, add up."""
        source, source_digest = _provenance(self._config)
        done = []
        for one in results.sets:
            counts = await self._write(one, request, source_digest)
            done.append(
                SetResult(
                    name=one.name,
                    counts=one.counts or counts,
                    seconds=seconds if one.seconds is None else one.seconds,
                    metrics=one.metrics,
                )
            )
        # only now: no set of a point that is refused is ever seen
        metrics: dict[str, float] = {}
        for result in done:
            metrics |= result.metrics
            await stages.set_done(result)
        return PointResult(
            counts=sum((result.counts for result in done), Counts()),
            metrics=metrics,
            engines=results.engines or [NAME],
            weight_versions=results.weight_versions,
            provenance={**results.provenance, NAME: source},
        )

    async def _write(self, one: BoxSet, request: Request, config: str) -> Counts:
        directory = point_samples_dir(self._results_dir, request.point.key)
        journal = SampleJournal(directory, one.name, modes=self._modes)
        write = functools.partial(write_samples, one, journal, digest=request.digest, config=config)
        try:
            return await self._pause.insist(journal.path, lambda: asyncio.to_thread(write))
        except ResultsRefused as refused:
            raise EvalSkip(str(refused), reason=SkipReason.CRASHED) from refused


def _provenance(config: BlackBox) -> tuple[dict[str, Any], str]:
    """Say what evaluated, with a digest of everything that it was told."""
    what = config.class_ or config.command
    told = msgspec.json.encode([what, config.config, config.env, config.python], order="sorted")
    digest = hashlib.sha256(told).hexdigest()[:32]
    return {"class" if config.class_ else "command": what, "config": digest}, digest
