"""The fleet posture: evald launches and owns the engines of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

from evald.config import Fleet
from evald.engines.engine import Upkeep
from evald.engines.fast_pin import FAST, PLAIN, FastPin
from evald.engines.launcher import Launcher
from evald.engines.leftovers import reap_leftovers
from evald.engines.pin import Checksums, Loading
from evald.engines.pin_mode import PinMode
from evald.engines.plan import EnginePlan
from evald.engines.prepare import FleetPlan
from evald.engines.sglang_launcher import SGLangLauncher
from evald.engines.start_gate import StartGate, places_for
from evald.postures.engine_pool import EnginePool, Member
from evald.postures.rules import ROLLING, Rules

#: makes the launcher of an engine.
LauncherFactory = Callable[[EnginePlan], Launcher]


class FleetEngines(EnginePool):
    """The pool that first ends what an earlier daemon left; engine logs are in ``logs``."""

    def __init__(
        self, members: Sequence[Member], config: Fleet, rules: Rules, *, logs: Path
    ) -> None:
        super().__init__(members, config, rules)
        self._logs = logs

    async def run(self) -> None:
        """Supervise until cancelled; raises EvaldError when all engines are quarantined."""
        await asyncio.to_thread(reap_leftovers, self._logs)
        await super().run()


def fleet_engines(
    config: Fleet,
    results_dir: Path,
    *,
    plan: FleetPlan,
    launcher_factory: LauncherFactory | None = None,
    update_test: bool = True,
    on_alert: Callable[[str, str], Awaitable[None]] | None = None,
    rules: Rules = ROLLING,
) -> FleetEngines:
    """Build the fleet's engines (0 are allowed: then nothing is served).

    ``plan``: what ``prepare_fleet`` made of the config. ``launcher_factory`` replaces SGLang, and
    ``update_test = False`` leaves out the test whether running engines can be updated at all.
    ``on_alert`` is awaited with name and sentence of what a person should know.
    """

    async def on_leak(detail: str) -> None:
        if on_alert is not None:
            await on_alert("pin_memory_leak", detail)

    logs = results_dir / "engines"
    #: engines of one group take updates, or do not, for the same reason.
    modes: dict[str | None, PinMode] = {}
    fasts: dict[str | None, FastPin] = {}
    checksums = Checksums()
    starts = StartGate(places_for(_loading_processes(config, plan)))
    members = []
    for engine in plan.engines:
        if launcher_factory is not None:
            launcher = launcher_factory(engine)
        else:
            launcher = SGLangLauncher(engine, config, logs, env=plan.env, arguments=plan.arguments)
        fast = fasts.setdefault(engine.group, FastPin(_fast_mode(config, engine), on_leak=on_leak))
        loading = Loading(
            # what the plugin takes over is SGLang's own loader, too, under its first name
            load_format=PLAIN if engine.load_format == FAST else engine.load_format,
            timeout_s=config.load_timeout_s,
            checksums=checksums,
            fast=fast,
        )
        upkeep = Upkeep(
            start_timeout_s=config.start_timeout_s,
            stop_grace_s=config.stop_grace_s,
            loading=loading,
            starts=starts,
            mode=modes.setdefault(
                engine.group,
                PinMode(
                    restart=config.pin_mode == "restart",
                    model=Path(config.model) if update_test else None,
                ),
            ),
        )
        members.append(Member(name=engine.name, launcher=launcher, upkeep=upkeep))
    return FleetEngines(members, config, rules, logs=logs)


def _fast_mode(config: Fleet, engine: EnginePlan) -> Literal["auto", "on", "off"]:
    """Say what is asked for where it can be had: for SGLang's own loader, and not another."""
    if config.fast_pin == "auto" and config.device == "cpu":
        return "off"
    return config.fast_pin if engine.load_format in {PLAIN, FAST} else "off"


def _loading_processes(config: Fleet, plan: FleetPlan) -> int:
    """Count the processes of an engine that import at the same time.

    On a CPU they are forked from one that has. Else a scheduler for each GPU, and a detokenizer.
    """
    if config.device == "cpu":
        return 1
    return 1 + max((engine.gpus_per_engine for engine in plan.engines), default=0)
