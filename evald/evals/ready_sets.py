"""The eval sets of a config, made ready: generated, read, and the user's code in them tried."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.kinds import kind_of
from evald.evals.procedural.made import made_set
from evald.evals.sets import LoadedSet, load_set
from evald.evals.user_code import unready_functions, unready_graders
from evald.results.modes import Modes


def ready_sets(
    sets: list[EvalSet],
    *,
    environ: Mapping[str, str],
    data_dir: Path,
    keep_data: bool,
    modes: Modes,
) -> tuple[list[LoadedSet], list[str]]:
    """Return what can be loaded, and one sentence for each fault. Blocking.

    ``data_dir`` is where generated data lies; it stays there, unless ``keep_data`` is off.
    """
    loaded: list[LoadedSet] = []
    problems: list[str] = []
    with ExitStack() as stack:
        scratch = None
        if not keep_data:  # (a daemon that is killed must leave no directory behind)
            made = tempfile.TemporaryDirectory(prefix="evald-data-")
            scratch = Path(stack.enter_context(made))
        for one in sets:
            try:
                loaded.append(ready_set(one, data_dir, modes, environ, scratch=scratch))
            except ConfigError as error:
                problems += error.problems
    # (a set that was made has another grader than its config says)
    ready = {one.name: one.eval_set for one in loaded}
    problems += unready_graders([ready.get(one.name, one) for one in sets], environ)
    return loaded, problems + unready_functions(sets, environ)


def ready_set(
    eval_set: EvalSet,
    data_dir: Path,
    modes: Modes,
    environ: Mapping[str, str],
    *,
    scratch: Path | None = None,
) -> LoadedSet:
    """Load one set, whose questions are made first if they have to be. Raises ConfigError."""
    if eval_set.kind == "procedural":
        if faults := kind_of(eval_set).check():
            raise ConfigError([f"eval set {eval_set.name!r}: {fault}" for fault in faults])
        eval_set = made_set(eval_set, data_dir, modes=modes, environ=environ, scratch=scratch)
    return load_set(eval_set)
