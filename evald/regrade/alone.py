"""Regrading without a daemon: the ledger's lock is held, and nothing else is started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uvloop

from evald.config import Config
from evald.errors import ConfigError
from evald.evals.grading import make_workers
from evald.evals.ready_sets import ready_set
from evald.evals.sets import LoadedSet
from evald.evals.user_code import unready_graders
from evald.point import Kind, PointKey
from evald.pulse import Pulse
from evald.regrade.plan import What, no_such_set
from evald.regrade.regrader import Regrader
from evald.regrade.service import carry_out
from evald.results.index import PointIndex
from evald.results.ledger import Ledger
from evald.results.modes import Modes
from evald.status.view import RegradeView

#: nobody else wants the processors.
_MAX_WORKERS = 8


def load_sets(config: Config, names: Sequence[str]) -> list[LoadedSet]:
    """Load the eval sets with these names, or all. Blocking.

    Raises ConfigError with one sentence for each fault, and CannotRegrade for an unknown name.
    """
    known = [one.name for one in config.eval]
    for name in names:
        if name not in known:
            raise no_such_set(name, known)
    problems: list[str] = []
    loaded = []
    data_dir = Path(config.results.dir) / "data"
    for one in config.eval:
        if names and one.name not in names:
            continue
        try:
            loaded.append(ready_set(one, data_dir, Modes.of(config.results), os.environ))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return loaded


def regrade_alone(
    config: Config, sets: Sequence[LoadedSet], what: What, *, say: Callable[[str], None]
) -> bool:
    """Grade again what is wanted; ``say`` hears a sentence for each point. True: all went well.

    Raises CannotRegrade, ConfigError, and LedgerError (also when a daemon holds the lock).
    """
    environ = dict(os.environ)
    if problems := unready_graders([one.eval_set for one in sets], environ):
        raise ConfigError(problems)
    ledger = Ledger.open(config.results)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_regrade(config, sets, what, ledger, environ, say))
    finally:
        ledger.close()


async def _regrade(
    config: Config,
    sets: Sequence[LoadedSet],
    what: What,
    ledger: Ledger,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    regrader = Regrader(
        sets,
        config=config,
        ledger=ledger,
        next_key=lambda run, step, kind: next_key(ledger.index, run, step, kind),
        is_open=lambda _key: False,
        environ=environ,
        workers=make_workers(sets, min(os.cpu_count() or 1, _MAX_WORKERS)),
    )
    try:
        plan = await regrader.plan(what)
        view = RegradeView(ticket="", run=what.run, points=len(plan.points))
        await carry_out(regrader, plan, view, say=say, mark=Pulse("regrade").beat)
    finally:
        await regrader.close()
    return view.state == "done"


def next_key(index: PointIndex, run: str, step: int, kind: Kind) -> PointKey:
    """Return the revision that follows those of a step."""
    revisions = [state.key.revision for state in index.revisions(run, step, kind)]
    return PointKey(run, step, max(revisions, default=-1) + 1, kind)
