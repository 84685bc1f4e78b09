"""Composition root: builds the parts, and owns the root TaskGroup."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from evald import __version__
from evald.alerts.build import build_alerts, build_rules
from evald.alerts.builtin import builtin_alert
from evald.baseline import baseline_point
from evald.config import Config
from evald.config_load import dump_config
from evald.dispatch import Dispatcher
from evald.engines.log_sizes import LogSizes
from evald.errors import EvaldError
from evald.evals.grading import make_workers
from evald.evals.sets import LoadedSet
from evald.measure import Measure
from evald.operations import Operations
from evald.point import EvalPoint
from evald.postures.build import build_posture
from evald.postures.posture import Posture
from evald.preflight import Preflight
from evald.prompt_check import Job, check_prompts_apart
from evald.pulse import Pulse
from evald.regrade.regrader import Regrader
from evald.regrade.service import RegradeService
from evald.reload import Reload
from evald.results.disk import Disk
from evald.results.ledger import Ledger
from evald.results.sample_store import SampleStore
from evald.results.time_used import TimeUsed
from evald.run_ends import RunEnds
from evald.signals import hearing_signals
from evald.staging.best import BestKeeper
from evald.staging.intake import Intake
from evald.staging.retention import Retention
from evald.status.board import Board
from evald.status.herald import Herald
from evald.status.listen import tcp_listener
from evald.status.metrics import Metrics
from evald.status.sample_pages import AskedQuestion
from evald.status.server import StatusServer, socket_path
from evald.status.view import StatusView
from evald.status.watchdog import DEFAULT_WITHIN_S, Watchdog, watchdog_s

log = structlog.get_logger(__name__)

#: more than ever work at the same time beside one for each point in flight; most stay unmade.
_THREADS = 24
#: what a stop takes beside the drain: engines and other processes end.
_TAKE_DOWN_S = 120.0
#: processes that grade stored samples again: points that run need the others.
_REGRADE_WORKERS = 2


class _Stopped(Exception):
    """Shutdown, raised in the root TaskGroup."""


class Part(Protocol):
    """What works in the background as long as the daemon lives."""

    pulse: Pulse

    async def run(self) -> None:
        """Work until cancelled."""


class Daemon:
    """One eval node: staging in, engines beside, ledger out.

    ``read`` gives the config of now, for a reload, and ``set_log_level`` puts its level to use.
    """

    def __init__(
        self,
        config: Config,
        checked: Preflight,
        *,
        exit_on_run_end: bool,
        read: Callable[[], Config],
        set_log_level: Callable[[str], None],
    ) -> None:
        self._config = config
        self._read = read
        self._set_log_level = set_log_level
        self._checked = checked
        self._exit_on_run_end = exit_on_run_end
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._beat = 0
        self._state = "starting"
        self._started = time.monotonic()

    async def run(self) -> None:
        """Serve until a signal, or until the run ends (``exit_on_run_end``).

        Raises EvaldError when a part fails for good.
        """
        config = self._config
        log.info("config_resolved", config=dump_config(config))
        # points and readers that hash gigabytes must leave threads for the ledger and the rest
        threads = ThreadPoolExecutor(
            _THREADS + config.dispatch.max_in_flight, thread_name_prefix="evald"
        )
        asyncio.get_running_loop().set_default_executor(threads)
        async with AsyncExitStack() as stack:
            self._metrics = Metrics(self.view)
            ledger = Ledger.open(config.results, on_record=self._metrics.note)
            stack.callback(ledger.close)
            posture = build_posture(
                config, self._checked, ledger.index, ledger.pause, on_alert=self._alert
            )
            stack.push_async_callback(posture.close)
            retention = self._retention(stack)
            measure = Measure(
                config.dispatch,
                posture=posture,
                marker=config.staging.marker,
                time_used=TimeUsed(config.results, index=ledger.index, pause=ledger.pause),
            )
            self._build(ledger, posture, retention, measure)
            stack.callback(self._samples.close)
            self._server = StatusServer(
                socket_path(config),
                view=self.view,
                results_file=config.results_file,
                newest_seq=lambda: ledger.last_seq,
                tcp=tcp_listener(config.status, self._checked.environ),
                metrics=self._metrics.exposition,
                find_question=self._find_question,
                operate=Operations(
                    run=config.run,
                    dispatcher=self._dispatcher,
                    posture=posture,
                    retention=retention,
                    index=ledger.index,
                    next_key=self._intake.take_revision,
                    regrades=self._regrades,
                    stop=self._stop.set,
                    reload=self._reload,
                ),
            )
            await self._server.start()
            stack.push_async_callback(self._server.close)
            stack.enter_context(hearing_signals(self._stop, self._force, reload=self._reload.ask))
            await self._serve(posture)

    def _retention(self, stack: AsyncExitStack) -> Retention:
        config, best = self._config, None
        if config.keep_best is not None:
            best = BestKeeper(
                config.keep_best,
                marker=config.staging.marker,
                results_file=config.results_file,
                on_alert=self._alert,
            )
            stack.callback(best.close)
        return Retention(config.staging, on_alert=self._alert, best=best)

    def _build(
        self, ledger: Ledger, posture: Posture, retention: Retention, measure: Measure
    ) -> None:
        config = self._config
        self._ledger, self._posture = ledger, posture
        self._dispatcher = Dispatcher(
            config.dispatch,
            ledger=ledger,
            measure=measure,
            progress=posture.progress,
            retention=retention,
            shortage=self._shortage,
            run_ends=RunEnds(ledger=ledger, retention=retention, on_end=self._run_ended),
            baseline=self._baseline if config.dispatch.baseline and config.model_dir else None,
        )
        self._intake = Intake(
            config.staging,
            run=config.run,
            base=self._checked.base,
            index=ledger.index,
            retention=retention,
            offer=self._dispatcher.offer,
            on_alert=self._alert,
            baseline_step=config.dispatch.baseline_step,
            shared=config.shared is not None,
        )
        self._samples = SampleStore(
            config.results, index=ledger.index, is_open=self._dispatcher.is_open
        )
        self._disk = Disk(Path(config.results.dir), self._samples)
        self._logs = LogSizes(Path(config.results.dir))
        self._regrades = RegradeService(
            lambda: Regrader(
                self._checked.sets,
                config=self._config,
                ledger=ledger,
                next_key=self._intake.take_revision,
                is_open=self._dispatcher.is_open,
                workers=make_workers(self._checked.sets, _REGRADE_WORKERS),
                environ=self._checked.environ,
            )
        )

        self._board = Board(config, view=self.next_view)
        self._alerts = build_alerts(config, self._checked.environ, ledger=ledger, view=self.view)
        self._build_watch()

    def _build_watch(self) -> None:
        """Build what looks after the daemon itself, with systemd and without."""
        environ = self._checked.environ
        limit_s = watchdog_s(environ, os.getpid())
        watchdog = Watchdog(
            self._pulses,
            excuse=lambda: self._ledger.pause.why,
            within_s=limit_s / 2 if limit_s else DEFAULT_WITHIN_S,
        )
        self._herald = Herald(self.view, watchdog=watchdog, watchdog_s=limit_s)
        self._reload = Reload(
            self._config,
            self._checked.sets,
            read=self._read,
            use=self._use,
            announced=self._herald.reloading,
            index=self._ledger.index,
            environ=environ,
            context_len=self._checked.context_len,
        )

    def _parts(self) -> dict[str, Part]:
        """Name the parts that work in the background, each with one loop."""
        return {
            "staging": self._intake,
            "regrade": self._regrades,
            "samples": self._samples,
            "disk": self._disk,
            "loop lag": self._metrics.loop_lag,
            "alerts": self._alerts,
            "logs": self._logs,
            "status": self._board,
        }

    def _pulses(self) -> list[Pulse]:
        mine = [part.pulse for part in self._parts().values()]
        return [*mine, *self._dispatcher.pulses(), *self._posture.pulses()]

    async def _serve(self, posture: Posture) -> None:
        try:
            async with asyncio.TaskGroup() as root:
                for name, work in (
                    ("engines", posture.run()),
                    ("dispatch", self._dispatcher.run()),
                    *((name, part.run()) for name, part in self._parts().items()),
                    ("ready", self._announce()),
                    ("reload", self._reload.run()),
                ):
                    root.create_task(_forever(name, work), name=name)
                root.create_task(self._check_prompts(), name="prompts")
                root.create_task(self._until_stopped(), name="stop")
        except* _Stopped:
            log.info("stopped", state=self._state)

    async def _announce(self) -> None:
        """Tell systemd once the watch is armed, then keep its watchdog fed."""
        await self._intake.armed.wait()
        self._state = "serving"
        log.info("ready", root=self._config.staging.root)
        await self._herald.run()

    async def _use(self, config: Config, sets: list[LoadedSet]) -> None:
        """Take over what a reload has found to be good."""
        self._set_log_level(config.log_level)
        log.info("config_resolved", config=dump_config(config))
        self._alerts.use(build_rules(config))
        changed = sets is not self._checked.sets
        self._config, self._checked = config, msgspec.structs.replace(self._checked, sets=sets)
        if changed:
            await self._posture.use(sets, config.aggregate)

    async def _check_prompts(self) -> None:
        """Look at all prompts while the engines start; a set without any that works stops us."""
        config = self._config
        if config.model_dir is None or not config.eval:
            return
        sets = [loaded.eval_set for loaded in self._checked.sets]
        job = Job(sets, str(config.model_dir), self._checked.context_len)
        for note in await check_prompts_apart(job):
            log.warning("prompts", note=note)

    def _find_question(self, set_name: str, question: str) -> AskedQuestion | None:
        """Find what a stored sample was asked, for people who look at it."""
        for loaded in self._checked.sets:
            if loaded.name == set_name:
                for one in loaded.questions:
                    if one.id == question:
                        return AskedQuestion(one, loaded.data_digest)
        return None

    def _shown_state(self) -> str:
        paused = self._dispatcher.paused or self._ledger.pause.why
        return "paused" if paused and self._state == "serving" else self._state

    async def _alert(self, name: str, detail: str) -> None:
        await self._ledger.append(builtin_alert(self._config.run, name, detail))

    async def _shortage(self) -> str | None:
        return await self._intake.room.shortage()

    def _baseline(self, run: str) -> EvalPoint:
        step, marker = self._config.dispatch.baseline_step, self._config.staging.marker
        return baseline_point(run, step, self._config.model_dir or Path(), marker)

    def _run_ended(self, run: str) -> None:
        if self._exit_on_run_end:
            log.info("stopping", why=f"run {run} has ended")
            self._stop.set()

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        self._state = "draining"
        self._herald.stopping(self._config.dispatch.drain_timeout_s + _TAKE_DOWN_S)
        drained = asyncio.create_task(
            self._dispatcher.drain(self._config.dispatch.drain_timeout_s), name="drain"
        )
        forced = asyncio.create_task(self._force.wait(), name="force")
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, forced):
            task.cancel()
        raise _Stopped

    def next_view(self) -> StatusView:
        """Let the beat go on, and show the status."""
        self._beat += 1
        return self.view()

    def view(self) -> StatusView:
        """Show the status as it is now."""
        queued, running = self._dispatcher.view()
        return StatusView(
            version=__version__,
            pid=os.getpid(),
            beat=self._beat,
            time=time.time(),
            uptime_s=round(time.monotonic() - self._started, 3),
            state=self._shown_state(),
            not_written=self._ledger.pause.why,
            config_fault=self._reload.fault,
            run=self._config.run,
            results=str(self._config.results_file),
            cap=self._config.dispatch.max_in_flight,
            queued=queued,
            running=running,
            ended=self._ledger.index.outcome_counts(),
            engines=self._posture.engines(),
            staging=self._intake.view(),
            disk=self._disk.view(),
            lag_steps=self._ledger.index.lag_steps(),
            regrades=self._regrades.views(),
            last_seq=self._ledger.last_seq,
            listen=self._server.listen,
        )


async def _forever(name: str, work: Awaitable[object]) -> None:
    """Make the end of a background task an error: it must outlive everything but the stop."""
    await work
    raise EvaldError(f"cannot go on: background task {name!r} ended by itself (a bug of evald)")
