"""Names in a staging root, and small files that appear there at once."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from evald.trainer.publish.faults import PublishError


def check_place(root: str | os.PathLike[str], pattern: str) -> None:
    """See that snapshots named by ``pattern`` lie below ``root``; raises ValueError."""
    checked_root(root)
    if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
        raise ValueError(
            f'cannot name snapshots: pattern "{pattern}" leads out of the root; give a relative '
            'one without ".."'
        )


def checked_root(root: str | os.PathLike[str]) -> Path:
    """Return the root as a path; raises ValueError for what is no directory of this host."""
    name = os.fspath(root)
    if not name:
        raise ValueError('cannot publish: the root is ""; give the directory that evald watches')
    if ":" in name.partition("/")[0]:
        raise ValueError(
            f'cannot use "{name}" as the root: it is not on this host; give a directory here, and '
            "another host's to EvalDispatcher: its staging root as destination=, its HTTP API as "
            "url="
        )
    return Path(root)


def make_root(root: Path) -> None:
    """Make the root, but not what it lies in: a mistyped one must not come to be.

    Raises PublishError for a parent that is missing.
    """
    try:
        root.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise PublishError(
            f"cannot publish into {root}: there is no directory {root.parent}; give the directory "
            "that evald watches, or make it"
        ) from error


def with_run(run: str | None, **content: Any) -> dict[str, Any]:
    """Name the run only where the caller did: else evald takes the folder's or the config's."""
    return content if run is None else {"run": run, **content}


def name_of(pattern: str, step: int) -> str:
    """Return the name of a step's snapshot below the root; raises PublishError, ValueError."""
    if "{step}" not in pattern:
        raise PublishError(f'cannot name the snapshot: pattern "{pattern}" lacks "{{step}}"')
    if step < 0:
        raise PublishError(f"cannot publish step {step}: steps are whole numbers from 0 up")
    check_place(".", pattern)
    return pattern.replace("{step}", str(step))


def step_expression(pattern: str) -> str:
    """Return what the names of snapshots match; its group ``step`` is the number."""
    first, *rest = map(re.escape, pattern.split("{step}"))
    return f"{first}(?P<step>[0-9]{{1,15}}){'(?P=step)'.join(rest)}"


def flat(name: str) -> str:
    """Return one path component for a name like ``global_step_5/actor/huggingface``."""
    return name.replace("/", "--")


def hidden(root: Path, name: str) -> Path:
    """Return an unused name that evald's scan ignores, on the root's file system."""
    return root / f".tmp-{flat(name)}.{secrets.token_hex(4)}"


def write_atomically(root: Path, path: Path, content: dict[str, Any]) -> Path:
    """Write JSON by way of a hidden name in ``root``; return ``path``."""
    temporary = hidden(root, path.name)
    try:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.chmod(0o644)
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_small(path: Path) -> bytes:
    """Read a regular file; a pipe in its place must not hold up the training. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.readall()
