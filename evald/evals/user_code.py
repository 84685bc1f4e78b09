"""Whether the user's own graders and generate functions can be used here: before anything starts.

A module of the user's is imported in a process of its own, as it will be later.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from evald.config import EvalSet
from evald.evals.custom.settings import function_settings
from evald.evals.graders import Rules, check_grader
from evald.evals.graders.command import Command
from evald.evals.graders.external import grader_env
from evald.evals.graders.python import Python
from evald.evals.graders.remote import Remote
from evald.evals.kinds import kind_of
from evald.evals.worker import HEADER_BYTES, Reply, preload_python

#: a module may take long to import: torch from a cold disk.
_IMPORT_TIMEOUT_S = 120.0


def unready_graders(sets: list[EvalSet], environ: Mapping[str, str]) -> list[str]:
    """One sentence for each set whose grader cannot work here. Blocking.

    Services are not asked: they may come later.
    """
    problems = []
    faults: dict[bytes, str | None] = {}
    for one in sets:
        if check_grader(one):
            continue  # said already
        rules = Rules.of(one)
        key = msgspec.json.encode(rules, order="deterministic")
        if key not in faults:
            faults[key] = _grader_fault(rules, environ)
        if fault := faults[key]:
            problems.append(f"eval set {one.name!r}: grader {one.grader!r}: {fault}")
    return problems


def unready_functions(sets: list[EvalSet], environ: Mapping[str, str]) -> list[str]:
    """One sentence for each set whose generate function cannot be used here. Blocking."""
    problems = []
    faults: dict[tuple[str, str], str | None] = {}
    for one in sets:
        if one.function is None or kind_of(one).check():
            continue  # said already
        settings = function_settings(one)
        key = one.function, settings.cwd
        if key not in faults:
            env = grader_env(environ, settings.pass_env)
            words = ("evald.evals.custom.function", *key)
            faults[key] = _import_fault(words, env, msgspec.json.Decoder(str | None).decode)
        if fault := faults[key]:
            problems.append(f"eval set {one.name!r}: function: {fault}")
    return problems


def _grader_fault(rules: Rules, environ: Mapping[str, str]) -> str | None:
    if rules.inner == "remote":
        token_env = Remote(rules).settings.token_env
        if token_env and not environ.get(token_env):
            return f"token_env: environment variable {token_env} is not set; set it, or remove it"
    if rules.inner == "command":
        settings = Command(rules).settings
        return _no_program(settings.argv[0], settings.cwd, environ.get("PATH"))
    if rules.inner == "python":
        # a worker says whether it is ready, and ends at the end of its input
        words = ("evald.evals.worker", str(os.getpid()), preload_python(rules))
        env = grader_env(environ, Python(rules).settings.pass_env)
        return _import_fault(words, env, _worker_fault)
    return None


def _worker_fault(output: bytes) -> str | None:
    return msgspec.msgpack.decode(output[HEADER_BYTES:], type=Reply).failure


def _no_program(word: str, cwd: str, path: str | None) -> str | None:
    """Say why a program cannot be started: looked up on PATH, or relative to ``cwd``."""
    if not os.path.isdir(cwd):  # noqa: PTH112 (text may be no path)
        return f"cwd: {cwd} is no directory; give the one that the program runs in"
    where = os.path.join(cwd, word) if os.sep in word else word  # noqa: PTH118 (as above)
    if shutil.which(where, path=path) is None:
        return f"argv: {word} is no program; give its path, or make it executable"
    return None


def _import_fault(
    words: tuple[str, ...], env: Mapping[str, str], read: Callable[[bytes], str | None]
) -> str | None:
    """Have a module of evald's, with its arguments, import the user's; ``read`` what it says."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, our own modules
            [sys.executable, "-P", "-m", *words],
            input=b"",
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
        return read(done.stdout)
    except msgspec.DecodeError:
        return f"the process that imports it ended with exit code {done.returncode}; see above why"
