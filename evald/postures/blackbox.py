"""Posture [blackbox]: a snapshot's directory goes in, results come out of a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from evald.config import BlackBox
from evald.errors import EvaldError, EvalSkip, LedgerError
from evald.point import EvalPoint, PointKey, SkipReason
from evald.postures.blackbox_class import ClassBox
from evald.postures.blackbox_command import CommandBox
from evald.postures.blackbox_process import (
    NAME,
    Attempts,
    Box,
    Request,
    Room,
    environment,
    reap,
)
from evald.postures.blackbox_results import BoxResults, BoxSet, ResultsRefused, read_results
from evald.postures.blackbox_samples import write_samples
from evald.postures.contract import PointResult, SetResult, Stages
from evald.results.modes import Modes
from evald.results.records import Counts
from evald.results.samples import SampleJournal, point_samples_dir
from evald.status.view import EngineView, SetView

log = structlog.get_logger(__name__)


class BlackBoxPosture:
    """Fulfils ``Posture`` with a black box."""

    def __init__(self, config: BlackBox, *, results_dir: Path, modes: Modes) -> None:
        self._runner = BlackBoxRunner(config, results_dir=results_dir, modes=modes)

    async def run(self) -> None:
        """Supervise the black box until cancelled."""
        await self._runner.run()

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
        """Let the black box measure; what it read must be what was hashed."""
        stages.state("evaluating")
        result = await self._runner.evaluate(
            point, digest=digest, deadline=deadline, on_set=stages.set_done
        )
        await stages.check_unchanged()
        return result

    def engines(self) -> list[EngineView]:
        """Show the black box as one engine."""
        return self._runner.engines()

    async def restart(self, engine: str) -> None:
        """Refuse: each crash gets a fresh process anyway."""
        raise EvaldError(f"cannot restart {engine}: a black box has no engines of evald's")

    async def release(self, engine: str) -> None:
        """Refuse: nothing is ever quarantined."""
        raise EvaldError(f"cannot release {engine}: a black box has no engines of evald's")

    def progress(self) -> list[SetView]:
        """Show nothing: a black box tells its sets when it is done."""
        return []

    async def close(self) -> None:
        """Have nothing more to end."""


class BlackBoxRunner:
    """Evaluates points one after another, by a user's class or command.

    A class's process stays alive between points. ``results_dir`` gets ``blackbox/`` with a log for
    each process and an output directory for each attempt, and ``samples/``.
    """

    def __init__(
        self,
        config: BlackBox,
        *,
        results_dir: Path,
        modes: Modes | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._config = config
        self._results_dir = results_dir
        self._modes = modes or Modes()
        self._attempts = Attempts(results_dir / "blackbox", config.keep_logs)
        self._room = Room(config, environment(config, environ), self._attempts)
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

    async def evaluate(
        self,
        point: EvalPoint,
        *,
        digest: str,
        deadline: float | None,
        on_set: Callable[[SetResult], Awaitable[None]],
    ) -> PointResult:
        """Evaluate one point; ``deadline`` is in the loop's time, beside the configured timeout.

        ``on_set`` is awaited with each set. Raises EvalSkip: with the reason of the black box
        itself, "deadline" or "crashed"; LedgerError when the results directory cannot be written.
        Cancellation ends the process, and nothing counts.
        """
        loop = asyncio.get_running_loop()
        async with self._turn:
            began_s = loop.time()
            limit = began_s + self._config.timeout_s
            await self._reap()
            try:
                output_dir = await asyncio.to_thread(self._attempts.new_output, point.key)
            except OSError as error:
                raise self._unwritable(self._attempts.directory, error) from error
            request = Request(
                point=point,
                digest=digest,
                output_dir=output_dir,
                limit=limit if deadline is None else min(limit, deadline),
            )
            try:
                await self._ask(request)
                results = await self._read(output_dir)
                seconds = loop.time() - began_s
                return await self._take(results, point.key, digest, seconds, on_set)
            except EvalSkip as skip:
                if self._state == "stopped":
                    # the daemon stops, which is not the point's end: it resumes
                    raise asyncio.CancelledError from skip
                self._crashes += skip.reason == SkipReason.CRASHED
                self._detail = f"{point.key}: {skip.reason}: {skip.detail}"
                # nothing of a point is left when it has ended
                await self._room.empty()
                raise

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

    async def _reap(self) -> None:
        """Kill what a daemon that was killed together with its guards has left."""
        if not self._reaped:
            await asyncio.to_thread(reap, self._attempts.directory)
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
        self,
        results: BoxResults,
        key: PointKey,
        digest: str,
        seconds: float,
        on_set: Callable[[SetResult], Awaitable[None]],
    ) -> PointResult:
        """Write samples, report sets, add up."""
        source, source_digest = _provenance(self._config)
        done = []
        for one in results.sets:
            counts = await asyncio.to_thread(self._write, one, key, digest, source_digest)
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
            await on_set(result)
        return PointResult(
            counts=sum((result.counts for result in done), Counts()),
            metrics=metrics,
            engines=results.engines or [NAME],
            weight_versions=results.weight_versions,
            provenance={**results.provenance, NAME: source},
        )

    def _write(self, one: BoxSet, key: PointKey, digest: str, config: str) -> Counts:
        directory = point_samples_dir(self._results_dir, key)
        journal = SampleJournal(directory, one.name, modes=self._modes)
        try:
            return write_samples(one, journal, digest=digest, config=config)
        except ResultsRefused as refused:
            raise EvalSkip(str(refused), reason=SkipReason.CRASHED) from refused
        except OSError as error:
            raise self._unwritable(journal.path, error) from error

    def _unwritable(self, path: Path, error: OSError) -> LedgerError:
        return LedgerError(
            f"cannot write {path}: {error.strerror}; make room, or correct the rights, in "
            "results.dir"
        )


def _provenance(config: BlackBox) -> tuple[dict[str, Any], str]:
    """Say what evaluated, with a digest of everything that it was told."""
    what = config.class_ or config.command
    told = msgspec.json.encode([what, config.config, config.env, config.python], order="sorted")
    digest = hashlib.sha256(told).hexdigest()[:32]
    return {"class" if config.class_ else "command": what, "config": digest}, digest
