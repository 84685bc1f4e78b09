"""From the config's one posture to the object that measures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from evald.config import Config
from evald.evals.curve import CurveWatch
from evald.evals.earlier import EarlierPoints
from evald.evals.evaluator import Evaluator
from evald.postures.contract import Engines
from evald.postures.evaluated import EvaluatedPosture
from evald.postures.posture import Posture
from evald.postures.rules import Rules
from evald.preflight import Preflight
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.results.pause import Pause


def build_posture(
    config: Config,
    checked: Preflight,
    index: PointIndex,
    pause: Pause | None = None,
    on_alert: Callable[[str, str], Awaitable[None]] | None = None,
) -> Posture:
    """Build the posture; whether evald starts engines at all is decided here and nowhere else.

    ``index``: the ledger's, for comparisons with earlier points. ``pause``: what it shares with
    whoever else writes results. ``on_alert`` is awaited with name and sentence of an alert.
    """
    pause = pause or Pause()
    results_dir = Path(config.results.dir)
    if config.blackbox is not None:
        from evald.postures.blackbox.posture import BlackBoxPosture  # noqa: PLC0415 (only where it is used)

        return BlackBoxPosture(
            config.blackbox,
            results_dir=results_dir,
            modes=Modes.of(config.results),
            environ=checked.environ,
            pause=pause,
        )
    dispatch = config.dispatch
    rules = Rules(rolling=dispatch.rolling, consolidate=dispatch.rolling and dispatch.consolidate)
    engines: Engines
    if config.fleet is not None and checked.fleet is not None:
        from evald.postures.fleet import fleet_engines  # noqa: PLC0415 (only where it is used)

        engines = fleet_engines(
            config.fleet, results_dir, plan=checked.fleet, rules=rules, on_alert=on_alert
        )
    elif config.attached is not None:
        from evald.postures.attached import attached_engines  # noqa: PLC0415 (only where it is used)

        engines = attached_engines(config.attached, environ=checked.environ, rules=rules)
    elif config.shared is not None:
        from evald.postures.shared import shared_engines  # noqa: PLC0415 (only where it is used)

        engines = shared_engines(config.shared, environ=checked.environ)
    else:
        raise ValueError("the config has no posture")
    evaluator = Evaluator(
        checked.sets,
        dispatch=config.dispatch,
        results=config.results,
        model_dir=Path(config.posture.model or ""),
        context_len=checked.context_len,
        earlier=EarlierPoints(index, results_dir),
        curve=CurveWatch(index, config.dispatch.on_set_change),
        aggregates=config.aggregate,
        pause=pause,
        deterministic=config.fleet is not None and config.fleet.deterministic,
        environ=checked.environ,
    )
    return EvaluatedPosture(engines, evaluator, loads=config.shared is None)
