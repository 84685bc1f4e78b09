"""What graders have in common that run the user's own code on this machine."""

from __future__ import annotations

import functools
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from evald.config_types import Positive, Table, Text
from evald.engines.environment import inherited_env
from evald.evals.graders.contract import Grader, GraderFailed, Rules, whole_version
from evald.evals.graders.settings import setting_faults


class ExternalSettings(Table, frozen=True, kw_only=True):
    """Settings of graders ``python`` and ``command``."""

    #: working directory, relative to the config file; modules and programs are found there.
    cwd: Text = "."
    #: change it when something changes scores that evald cannot see (a judge's prompt, a library).
    version: str = ""
    #: answers that are graded at a time, each in a process of its own.
    concurrency: Positive = 2
    #: environment variables that the grader sees beside the built-in list.
    pass_env: list[str] = msgspec.field(default_factory=list)


class AnyLabel:
    """Check of a grader that gives the reference to user's code as the row has it."""

    def __init__(self, rules: Rules, kind: type[Table]) -> None:
        self.rules = rules
        self._kind = kind

    def check(self) -> list[str]:
        """One sentence for each fault of the settings."""
        return setting_faults(self._kind, self.rules)

    def label_fault(self, label: Any) -> str | None:  # noqa: ARG002 - the contract
        """Any JSON value will do."""
        return None


#: bytes of memory that a process may ask for.
Memory = Annotated[int, msgspec.Meta(ge=1 << 26)]


def refuse_other_version(grader: Grader, rules: Rules) -> None:
    """Raise GraderFailed where the user's files are no longer those that the set was loaded with.

    Scores of two versions under one name would be no curve.
    """
    if rules.version and whole_version(grader) != rules.version:
        raise GraderFailed(
            f"the files of grader {rules.grader!r} have changed since evald started; restart evald"
        )


def file_digest(path: Path) -> str:
    """Hex digest of a file; "missing" where it cannot be read. Blocking."""
    try:
        stat = path.stat()
        return _digest(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except OSError:
        return "missing"


@functools.lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def grader_env(environ: Mapping[str, str], pass_env: list[str]) -> dict[str, str]:
    """Return the part of the daemon's environment that a grader of the user's may see."""
    # (PYTHONPATH: the process must find evald where the daemon has found it)
    return {"PYTHONUNBUFFERED": "1", **inherited_env(environ, [*pass_env, "PYTHONPATH"])}


def limit_memory(max_bytes: int) -> None:
    """Limit what this process may ask for; programs that it starts may be given more again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))


def version_text(*parts: Any) -> str:
    """One text for what a version consists of."""
    return msgspec.json.encode(parts, order="deterministic").decode()
