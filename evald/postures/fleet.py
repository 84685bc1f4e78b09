"""The fleet posture: evald launches and owns the engines of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from evald.config import Fleet
from evald.engines.engine import Upkeep
from evald.engines.launcher import Launcher
from evald.engines.leftovers import reap_leftovers
from evald.engines.pin import Checksums, Loading
from evald.engines.pin_mode import PinMode
from evald.engines.plan import EnginePlan
from evald.engines.prepare import FleetPlan
from evald.engines.sglang_launcher import SGLangLauncher
from evald.postures.engine_pool import EnginePool, Member, Rules

#: makes the launcher of an engine.
LauncherFactory = Callable[[EnginePlan], Launcher]


class FleetEngines(EnginePool):
    """The pool that first ends what an earlier daemon left; engine logs are in ``logs``."""

    def __init__(self, members: Sequence[Member], config: Fleet, *, logs: Path) -> None:
        super().__init__(members, config, Rules())
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
) -> FleetEngines:
    """Build the fleet's engines (0 are allowed: then nothing is served).

    ``plan``: what ``prepare_fleet`` made of the config. ``launcher_factory`` replaces SGLang, and
    ``update_test = False`` leaves out the test whether running engines can be updated at all.
    """
    logs = results_dir / "engines"
    #: engines of one group take updates, or do not, for the same reason.
    modes: dict[str | None, PinMode] = {}
    checksums = Checksums()
    members = []
    for engine in plan.engines:
        if launcher_factory is not None:
            launcher = launcher_factory(engine)
        else:
            launcher = SGLangLauncher(engine, config, logs, env=plan.env, arguments=plan.arguments)
        loading = Loading(
            load_format=engine.load_format, timeout_s=config.load_timeout_s, checksums=checksums
        )
        upkeep = Upkeep(
            start_timeout_s=config.start_timeout_s,
            stop_grace_s=config.stop_grace_s,
            loading=loading,
            mode=modes.setdefault(
                engine.group,
                PinMode(
                    restart=config.pin_mode == "restart",
                    model=Path(config.model) if update_test else None,
                ),
            ),
        )
        members.append(Member(name=engine.name, launcher=launcher, upkeep=upkeep))
    return FleetEngines(members, config, logs=logs)
