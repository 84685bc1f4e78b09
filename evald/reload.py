"""The config read again while the daemon runs: what may change then, and what needs a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from evald.config import Config
from evald.config_check import cross_check
from evald.errors import ConfigError, EvaldError
from evald.evals.curve import CHANGED_REMEDY, CurveWatch, difference
from evald.evals.ready_sets import ready_sets
from evald.evals.sets import LoadedSet
from evald.prompt_check import Job, check_prompts_apart
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.text import one_line

log = structlog.get_logger(__name__)

#: tables and keys that change while the daemon runs; every other one needs a restart.
_EVALS = ("eval", "eval_config", "defaults", "aggregate")
_OTHERS = ("alert", "log_level")


class Reload:
    """Reads the config again, checks it as a start would, and puts it to use.

    ``read`` gives the config of now (blocking; raises ConfigError), ``sets`` are those in use.
    ``use`` is awaited with the config and sets to use from the next point on, and ``announced``
    entered around it all. ``context_len`` (tokens): what the engines were told.
    """

    def __init__(
        self,
        config: Config,
        sets: list[LoadedSet],
        *,
        read: Callable[[], Config],
        use: Callable[[Config, list[LoadedSet]], Awaitable[None]],
        announced: Callable[[], AbstractContextManager[None]],
        index: PointIndex,
        environ: Mapping[str, str],
        context_len: int | None,
    ) -> None:
        self._config = config
        self._sets = sets
        self._read = read
        self._use = use
        self._announced = announced
        self._index = index
        self._environ = environ
        self._context_len = context_len
        self._one_at_a_time = asyncio.Lock()
        #: one sentence while the config on disk is not the one in use.
        self.fault = ""
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have it done soon; nobody waits for the answer, which goes to the log."""
        self._asked.set()

    async def run(self) -> None:
        """Do what was asked for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            with contextlib.suppress(EvaldError):  # it is in the log, and stays in the status
                await self()

    async def __call__(self) -> str:
        """Do it; returns a sentence that says what has changed, and what has not.

        Raises EvaldError when the config is bad: then everything stays as it was.
        """
        async with self._one_at_a_time:
            with self._announced():
                return await self._tell()

    async def _tell(self) -> str:
        try:
            said = await self._reload()
        except EvaldError as error:
            why = one_line("; ".join(str(error).splitlines()))
            self.fault = f"cannot reload the config, the old one stays: {why}"
            log.error("config_not_reloaded", detail=why)  # noqa: TRY400 (a person's mistake)
            raise EvaldError(self.fault) from error
        log.info("config_reloaded", detail=said)
        return said

    async def _reload(self) -> str:
        new = await asyncio.to_thread(self._read)
        old = self._config
        config = msgspec.structs.replace(
            old, **{name: getattr(new, name) for name in (*_EVALS, *_OTHERS)}
        )
        # what is new must also fit what stays
        places = [f"eval set {one.name!r}" for one in config.eval]
        if problems := cross_check(config, places):
            raise ConfigError(problems)
        changes = [word for word in _OTHERS if getattr(old, word) != getattr(config, word)]
        sets = self._sets
        if config.eval or old.eval:
            loaded = await self._ready(config)
            found = set_changes(self._sets, loaded)
            if found or config.aggregate != old.aggregate:
                await self._check_prompts(config, loaded)
                sets, changes = loaded, [*found, *changes]
                if config.aggregate != old.aggregate:
                    changes.append("aggregate")
        self._config, self._sets = config, sets
        if changes:
            await self._use(config, sets)
        left = differences(msgspec.to_builtins(config), msgspec.to_builtins(new))
        self.fault = f"needs a restart: {', '.join(left)}" if left else ""
        done = f"changed: {', '.join(changes)}" if changes else "nothing has changed"
        return f"{done}; {self.fault}" if self.fault else done

    async def _ready(self, config: Config) -> list[LoadedSet]:
        sets, problems = await asyncio.to_thread(
            ready_sets,
            config.eval,
            environ=self._environ,
            data_dir=Path(config.results.dir) / "data",
            keep_data=True,
            modes=Modes.of(config.results),
        )
        if problems:
            raise ConfigError(problems)
        if not self._index.run_ended(config.run):
            watch = CurveWatch(self._index, config.dispatch.on_set_change)
            changed = watch.changed(config.run, sets)
            if changed and config.dispatch.on_set_change == "refuse":
                raise ConfigError([f"{sentence}; {CHANGED_REMEDY}" for sentence in changed])
            for sentence in changed:
                log.warning("curve_breaks", detail=sentence)
        return sets

    async def _check_prompts(self, config: Config, sets: list[LoadedSet]) -> None:
        """Raise ConfigError for a set that has no question which can be asked."""
        if config.model_dir is None or not sets:
            return
        job = Job([one.eval_set for one in sets], str(config.model_dir), self._context_len)
        for note in await check_prompts_apart(job):
            log.warning("prompts", note=note)


def set_changes(old: list[LoadedSet], new: list[LoadedSet]) -> list[str]:
    """Name the eval sets that are new, gone or other than before, and in what."""
    before, after = {one.name: one for one in old}, {one.name: one for one in new}
    found = [f"eval set {name!r} is new" for name in after if name not in before]
    found += [f"eval set {name!r} is gone" for name in before if name not in after]
    for name, one in after.items():
        was = before.get(name)
        if was is None:
            continue
        other = difference(was, one)
        if not other and was.eval_set != one.eval_set:
            other = "settings that no score depends on"
        if other:
            found.append(f"eval set {name!r} has other {other}")
    if not found and [*before] != [*after]:
        found = ["the order of the eval sets"]
    return found


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Name the keys in which two trees differ; never their values, which may be secrets."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            where = f"{key}.{name}" if key else name
            found += differences(old.get(name), new.get(name), where)
        return found
    return [] if old == new else [key]
