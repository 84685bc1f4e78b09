"""A procedural set becomes an ordinary one: its questions are written into a file, once.

The file's name says what is in it: task, number of questions, seed, and a digest of the settings
and the library's version. It stays beside the results, and is taken again as long as the name fits.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.graders.contract import BOXED, Rules
from evald.evals.graders.external import grader_env
from evald.evals.procedural.tasks import CHECKED_VERSION
from evald.results.modes import Modes

#: the library's own verifier, as a name for ``grader``.
GRADER = "reasoning_gym"
_LIBRARY = "reasoning-gym"
#: goes up when rows are written differently.
_VERSION = 1
#: some tasks take half a second for a question.
_TIMEOUT_S = 3600.0


def library_version() -> str | None:
    """Return the version of reasoning-gym, without importing it; None where there is none."""
    try:
        return importlib.metadata.version(_LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_notes(sets: list[EvalSet]) -> list[str]:
    """Say so when the library is not the one that the tasks were checked with."""
    tasks = sorted({one.task for one in sets if one.kind == "procedural" and one.task})
    version = library_version()
    if not tasks or version in {None, CHECKED_VERSION}:
        return []
    sentence = (
        f"WARNING: {_LIBRARY} {version} is installed, and its tasks were checked with "
        f"{CHECKED_VERSION}; check yours: python -m evald.evals.procedural.probe {' '.join(tasks)}"
    )
    return [sentence]


def made_set(
    eval_set: EvalSet,
    directory: Path,
    *,
    modes: Modes,
    environ: Mapping[str, str],
    scratch: Path | None = None,
) -> EvalSet:
    """Return the ordinary set that a procedural one (checked before) stands for.

    Its file is made in ``directory`` (or in ``scratch``) if it is not there yet. Raises
    ConfigError. Blocking: the library takes seconds to import, and up to half a second for a
    question.
    """
    version = library_version()
    if version is None:
        raise ConfigError([
            f"eval set {eval_set.name!r}: {_LIBRARY} is not installed; install evald[procedural]"
        ])  # fmt: skip
    path = directory / _file_name(eval_set, version)
    if not path.exists():
        path = (scratch or directory) / path.name
        _make(eval_set, path, modes, environ)
    made = msgspec.structs.replace(
        eval_set,
        path=str(path),
        input_key="prompt",
        label_key="label",
        metadata_key="metadata",
        id_key=None,
        cluster_key=None,
        tool_key=None,
    )
    rules = Rules.of(eval_set)
    if rules.inner != GRADER:
        return made
    return msgspec.structs.replace(
        made,
        grader=f"{BOXED if rules.boxed else ''}python",
        grader_config={
            "function": "evald.evals.procedural.verifier:score",
            "cwd": os.sep,
            "version": f"{_LIBRARY} {version}",
        },
    )


def _job(eval_set: EvalSet) -> dict[str, object]:
    """Say what is to be made, in the words of ``writer.Job``."""
    return {
        "task": eval_set.task,
        "config": eval_set.task_config,
        "size": eval_set.task_size,
        "seed": eval_set.task_seed,
        "prompt": eval_set.task_prompt,
    }


def _file_name(eval_set: EvalSet, version: str) -> str:
    whole = msgspec.json.encode([_VERSION, version, _job(eval_set)], order="deterministic")
    digest = xxhash.xxh3_128_hexdigest(whole)[:12]
    return f"{eval_set.task}-{eval_set.task_size}-{eval_set.task_seed}-{digest}.jsonl"


def _make(eval_set: EvalSet, path: Path, modes: Modes, environ: Mapping[str, str]) -> None:
    """Write the file, whole or not at all; raises ConfigError."""
    where = f"cannot make eval set {eval_set.name!r}"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        modes.make_dirs(path.parent)
        os.close(modes.open(partial, os.O_WRONLY))
        fault = _write(eval_set, partial, environ)
        if fault is not None:
            raise ConfigError([f"{where}: {fault}"])
        # the name appears when the content is whole
        partial.rename(path)
    except OSError as error:
        raise ConfigError([
            f"{where}: cannot write {path}: {error.strerror}; make room, or correct the rights"
        ]) from error  # fmt: skip
    finally:
        partial.unlink(missing_ok=True)


def _write(eval_set: EvalSet, path: Path, environ: Mapping[str, str]) -> str | None:
    """Let a process of its own write; say what is wrong, or None."""
    order = msgspec.json.encode({"job": _job(eval_set), "path": str(path)})
    # (what depends on the order of sets is the same every time, too)
    env = {**grader_env(environ, []), "PYTHONHASHSEED": "0"}
    try:
        # (a task or two run small programs, which write files where they are)
        with tempfile.TemporaryDirectory(prefix="evald-made-") as scratch:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "evald.evals.procedural.writer"],
                input=order,
                stdout=subprocess.PIPE,
                cwd=scratch,
                env=env,
                timeout=_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_TIMEOUT_S:g} s; lower task_size"
    try:
        return msgspec.json.decode(done.stdout, type=str | None)
    except msgspec.DecodeError:
        return f"the process that makes it ended with exit code {done.returncode}; see above why"
