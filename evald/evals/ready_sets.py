"""The eval sets of a config, made ready: generated, read, and the user's code in them tried."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.custom.settings import function_settings
from evald.evals.grader_check import unready_graders
from evald.evals.graders.external import grader_env
from evald.evals.kinds import kind_of
from evald.evals.procedural.made import made_set
from evald.evals.sets import LoadedSet, load_set
from evald.results.modes import Modes

#: a module may take long to import: torch from a cold disk.
_IMPORT_TIMEOUT_S = 120.0


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
    with tempfile.TemporaryDirectory(prefix="evald-data-") as made:
        scratch = None if keep_data else Path(made)
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


def unready_functions(sets: list[EvalSet], environ: Mapping[str, str]) -> list[str]:
    """One sentence for each set whose generate function cannot be used here. Blocking.

    The module is imported in a process of its own, as it will be for a point.
    """
    problems = []
    faults: dict[tuple[str, str], str | None] = {}
    for one in sets:
        if one.function is None or kind_of(one).check():
            continue  # said already
        settings = function_settings(one)
        key = one.function, settings.cwd
        if key not in faults:
            faults[key] = _import_fault(*key, grader_env(environ, settings.pass_env))
        if fault := faults[key]:
            problems.append(f"eval set {one.name!r}: function: {fault}")
    return problems


def _import_fault(function: str, cwd: str, env: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, our own module
            [sys.executable, "-P", "-m", "evald.evals.custom.function", function, cwd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=dict(env),
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
            # a key pressed at a terminal is not for it
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"its module was not imported within {_IMPORT_TIMEOUT_S:g} s; make that quicker"
    try:
        return msgspec.json.decode(done.stdout, type=str | None)
    except msgspec.DecodeError:
        return f"the process that imports it ended with exit code {done.returncode}; see above why"
