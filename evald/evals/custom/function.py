"""The user's generate function: imported and looked at, in a process that may be the worse for it.

``python -m evald.evals.custom.function FUNCTION CWD`` says on standard output, in JSON, what is
wrong with it, or null.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any, cast

import msgspec

from evald.custom import Generate
from evald.errors import EvaldError
from evald.evals.graders.contract import GraderFailed
from evald.evals.graders.python import load


class Unusable(EvaldError):
    """The function cannot be used; the sentence says why."""


def load_function(function: str, cwd: str) -> Generate:
    """Import ``module:function`` into this process, which then has no other use.

    ``cwd`` becomes the working directory, and modules are found there first. Raises Unusable.
    """
    try:
        os.chdir(cwd)
    except OSError as error:
        raise Unusable(f"cannot enter cwd {cwd}: {error.strerror}") from error
    sys.path.insert(0, cwd)
    try:
        found: Any = load(function)
    except GraderFailed as failed:
        raise Unusable(str(failed)) from failed
    if not inspect.iscoroutinefunction(inspect.unwrap(found)) and not inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object may be an async function, too
    ):
        raise Unusable(f"cannot use {function}: it is not async; write async def")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise Unusable(
            f"cannot use {function}: it must take (client, question): {error}"
        ) from error
    return cast("Generate", found)


def main(function: str, cwd: str) -> None:
    """Say what is wrong with it."""
    # what the module prints must not stand in for the answer
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    fault = None
    try:
        load_function(function, cwd)
    except Unusable as unusable:
        fault = str(unusable)
    answer.write(msgspec.json.encode(fault))
    answer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
