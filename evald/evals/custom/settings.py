"""Settings of a generate function, and what says that it has changed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from evald.config import EvalSet
from evald.config_types import Table, Text
from evald.evals.graders.external import version_text
from evald.evals.graders.python import module_digest

#: goes up when functions are called differently.
_VERSION = 1


class FunctionSettings(Table, frozen=True, kw_only=True):
    """The table ``function_config``."""

    #: working directory, relative to the config file; modules are found there first.
    cwd: Text = "."
    #: given to the function, as ``client.config``.
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    #: processes that share the samples of the set: one runs many at a time, on one core.
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    #: environment variables that the processes see beside the built-in list.
    pass_env: list[str] = msgspec.field(default_factory=list)
    #: change it when something changes answers that evald cannot see (a tool, a library).
    version: str = ""


def function_settings(eval_set: EvalSet) -> FunctionSettings:
    """Return the settings, checked before."""
    return msgspec.convert(eval_set.function_config, FunctionSettings)


def function_version(eval_set: EvalSet) -> str:
    """Text that changes when the function may do something else; "" without one. Reads files.

    It names the function, its module's own file by digest (not what that imports), and what of the
    settings it can see.
    """
    if eval_set.function is None:
        return ""
    settings = function_settings(eval_set)
    return version_text(
        _VERSION,
        eval_set.function,
        module_digest(eval_set.function, settings.cwd),
        settings.config,
        settings.version,
    )
