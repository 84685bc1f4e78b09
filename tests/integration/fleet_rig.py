"""A running fleet over fake engines, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from evald.config import Fleet
from evald.engines.engine import Engine
from evald.engines.environment import engine_env
from evald.engines.plan import EnginePlan, engine_plan
from evald.engines.prepare import FleetPlan
from evald.engines.state import State
from evald.errors import EvaldError
from evald.point import PinTarget
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.postures.engine_pool import EnginePool
from evald.postures.fleet import fleet_engines
from evald.postures.rules import ROLLING, Rules
from evald.testing import (
    FakeEngine,
    FakeLauncher,
    write_snapshot,
)

_rids = itertools.count()


class Rig:
    """A running fleet and the fakes behind it."""

    def __init__(self, posture: EnginePool, launchers: list[FakeLauncher], root: Path) -> None:
        self.posture = posture
        self.launchers = launchers
        self.root = root
        self.task: asyncio.Task[None] | None = None

    def target(self, step: int, *, answer: int | None = None, **options: Any) -> PinTarget:
        directory = write_snapshot(
            self.root / f"step_{step}", answer=step if answer is None else answer, **options
        )
        return target_of(directory, step)

    async def ask(
        self, pin: Pin, samples: int = 1, timeout_s: float = 30.0, **sampling: Any
    ) -> list[Generation]:
        return await self.posture.generate(pin, request(samples, timeout_s, **sampling))

    def engine(self, index: int = 0) -> Engine:
        return self.posture._engines[index]

    def fake(self, index: int = 0) -> FakeEngine:
        return self.launchers[index].engines[-1]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_state(self, state: State, index: int = 0) -> None:
        await self.until(lambda: self.engine(index).state is state)


def target_of(directory: Path, step: int) -> PinTarget:
    return PinTarget(run="demo", step=step, digest=f"{step:08x}" * 4, directory=directory)


def plan_of(config: Fleet) -> FleetPlan:
    """Plan a fleet without asking SGLang for its server arguments."""
    return FleetPlan(
        engines=engine_plan(config), arguments=None, env=engine_env(config, os.environ), notes=[]
    )


def directory_of(target: PinTarget) -> Path:
    assert target.directory is not None
    return target.directory


def request(samples: int = 1, timeout_s: float = 30.0, **more: Any) -> GenerateRequest:
    sampling = [
        {"temperature": 0.0, "max_new_tokens": 32, "sampling_seed": i, **more}
        for i in range(samples)
    ]
    return GenerateRequest(
        prompts=[[1, 2, 3]] * samples, sampling=sampling, rid=f"q{next(_rids)}", timeout_s=timeout_s
    )


@contextlib.asynccontextmanager
async def fleet(
    base: Path,
    engines: int = 1,
    *,
    configure: Callable[[FakeEngine], None] = lambda _: None,
    delay_s: float = 0.0,
    max_running_requests: int = 128,
    prepare: Callable[[FakeLauncher, int], None] = lambda _launcher, _index: None,
    wait_ready: bool = True,
    update_test: bool = False,
    rules: Rules = ROLLING,
    **settings: Any,
) -> AsyncIterator[Rig]:
    launchers: list[FakeLauncher] = []

    def factory(_plan: EnginePlan) -> FakeLauncher:
        launcher = FakeLauncher(
            base,
            configure=configure,
            delay_s=delay_s,
            max_running_requests=max_running_requests,
        )
        prepare(launcher, len(launchers))
        launchers.append(launcher)
        return launcher

    settings = {"start_timeout_s": 5.0, "load_timeout_s": 5.0, "alive_timeout_s": 5.0} | settings
    config = Fleet(model=str(base), device="cpu", engines=engines, **settings)
    root = base.parent
    posture = fleet_engines(
        config,
        root,
        plan=plan_of(config),
        launcher_factory=factory,
        update_test=update_test,
        rules=rules,
    )
    rig = Rig(posture, launchers, root)
    rig.task = asyncio.create_task(rig.posture.run(), name="fleet")
    try:
        if wait_ready:
            await rig.until(lambda: all(e.state is State.READY for e in rig.posture._engines))
        yield rig
    finally:
        rig.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup, EvaldError):
            await rig.task
        for launcher in launchers:
            assert all(process.returncode is not None for process in launcher.processes)


def texts(answers: list[Generation]) -> list[str]:
    return [answer.text for answer in answers]
