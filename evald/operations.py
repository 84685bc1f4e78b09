"""What an operator can do to a running daemon: one verb, one method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from evald.dispatch import Dispatcher
from evald.errors import EvaldError
from evald.point import SHARED, EvalPoint, Kind, PointKey, Snapshot
from evald.postures.posture import Posture
from evald.regrade.plan import What
from evald.regrade.revision import NextKey
from evald.regrade.service import RegradeService
from evald.results.index import PointIndex, PointState
from evald.staging.retention import Retention
from evald.status.command import Command

log = structlog.get_logger(__name__)


class Operations:
    """Carries out commands; ``run`` is the run id where a command names none.

    ``next_key`` gives a revision of a step that nobody else has.
    """

    def __init__(
        self,
        *,
        run: str,
        dispatcher: Dispatcher,
        posture: Posture,
        retention: Retention,
        index: PointIndex,
        next_key: NextKey,
        regrades: RegradeService,
        stop: Callable[[], None],
        reload: Callable[[], Awaitable[str]],
    ) -> None:
        self._run = run
        self._dispatcher = dispatcher
        self._posture = posture
        self._retention = retention
        self._index = index
        self._next_key = next_key
        self._regrades = regrades
        self._stop = stop
        self._reload = reload

    async def __call__(self, command: Command) -> str:
        """Do it; returns a sentence that says what was done. Raises EvaldError."""
        log.info("operator", **msgspec.to_builtins(command))
        match command.verb:
            case "retry":
                said = await self._retry(command.run or self._run, _step(command))
            case "skip" | "abort":
                said = await self._end(command.run or self._run, _step(command), command)
            case "pause" | "resume":
                self._dispatcher.pause(paused=command.verb == "pause")
                said = "what queues is held back" if command.verb == "pause" else "points start"
            case "drain":
                self._stop()
                said = "the daemon drains and stops"
            case "reload":
                said = await self._reload()
            case "restart":
                await self._posture.restart(_engine(command))
                said = f"{command.engine} restarts"
            case "release":
                await self._posture.release(_engine(command))
                said = f"{command.engine} is released from quarantine"
            case "regrade":
                what = What(
                    run=command.run or self._run,
                    steps=command.steps,
                    sets=command.sets,
                    expects=command.expects,
                )
                said = await self._regrades.start(what, command.ticket)
        return said

    async def _end(self, run: str, step: int, command: Command) -> str:
        why = command.why or "no reason given"
        ended = await self._dispatcher.abort(
            run,
            step,
            f"an operator ended the point: {why}",
            queued_only=command.verb == "skip",
        )
        return f"{', '.join(str(key) for key in ended)} ends as skipped (aborted)"

    async def _retry(self, run: str, step: int) -> str:
        """Measure the newest bytes of a step once more, as its next revision."""
        states = self._index.revisions(run, step) or self._index.revisions(run, step, Kind.BASELINE)
        if not states:
            raise EvaldError(f"cannot retry step {step} of run {run}: no such point is known")
        last = states[-1]
        # one that has only just ended is still giving up its snapshot
        if last.outcome is None or self._dispatcher.is_open(last.key):
            raise EvaldError(f"cannot retry step {step} of run {run}: its point has not ended yet")
        if last.fingerprint.startswith(SHARED):
            raise EvaldError(
                f"cannot retry step {step} of run {run}: it was measured on the trainer's own "
                "engines, and only the trainer may ask for that"
            )
        if not last.directory or not await self._retention.keep(Path(last.directory)):
            raise EvaldError(
                f"cannot retry step {step} of run {run}: its snapshot {last.directory} is deleted; "
                "drop it again"
            )
        key = self._next_key(run, step, last.key.kind)
        point = _again(key, last)
        await self._dispatcher.offer(point)
        return f"{point.key} is queued"


def _again(key: PointKey, state: PointState) -> EvalPoint:
    snapshot = Snapshot(
        run=key.run,
        step=key.step,
        kind=key.kind,
        directory=Path(state.directory),
        fingerprint=state.fingerprint,
        size_bytes=state.size_bytes,
        digest=state.digest,
        # somebody asked for it: never "busy"
        final=True,
        owned=state.owned,
    )
    return EvalPoint(key, snapshot)


def _step(command: Command) -> int:
    if command.step is None:
        raise EvaldError(f"cannot {command.verb}: name the step")
    return command.step


def _engine(command: Command) -> str:
    if not command.engine:
        raise EvaldError(f"cannot {command.verb}: name the engine, as `evald status` shows it")
    return command.engine
