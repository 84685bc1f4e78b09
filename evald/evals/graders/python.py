"""Grader ``python``: a function of the user's, called in a worker process."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from evald.config_types import Function
from evald.evals.graders.contract import Grade, GraderFailed, Rules, Sample
from evald.evals.graders.external import (
    AnyLabel,
    ExternalSettings,
    Memory,
    file_digest,
    limit_memory,
    refuse_other_version,
    version_text,
)
from evald.evals.graders.verdict import verdict
from evald.text import one_line

#: how much of an exception's own words is reported, characters.
_MESSAGE_CHARS = 300


class PythonSettings(ExternalSettings, frozen=True, kw_only=True):
    """Which function, and how it runs."""

    #: "module:function", see ``Python``.
    function: Function
    #: bytes of memory of one process.
    max_memory_bytes: Memory = 4 << 30


class Python(AnyLabel):
    """``function(response, reference, metadata)`` gives a score; it may be async.

    ``response`` is the answer (behind the thinking, without the box of ``boxed_python``),
    ``reference`` and ``metadata`` are what the row has at ``label_key`` and ``metadata_key``. A
    parameter called ``prompt`` is given the prompt, text or messages, by name. The function
    returns a number, true or false, a dict (see ``verdict``) or a ``Grade``. What it raises makes
    the sample a ``grader_error``.

    The module is imported once in each worker, from ``cwd`` or from what is installed beside evald;
    calls of one worker come one after the other. What is printed goes to the daemon's log.
    """

    VERSION = 1

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, PythonSettings)

    @cached_property
    def settings(self) -> PythonSettings:
        """The settings, checked before."""
        return msgspec.convert(self.rules.config, PythonSettings)

    def version(self) -> str:
        """Name the function, and its module's own file by digest (not what that imports)."""
        settings = self.settings
        return version_text(
            self.VERSION,
            settings.function,
            module_digest(settings.function, settings.cwd),
            settings.version,
        )

    def grade(self, sample: Sample) -> Grade:
        """Call the function: for a worker process of this grader alone."""
        function = load(self.settings.function)
        by_name = {"prompt": sample.prompt} if takes_prompt(function) else {}
        try:
            result = function(sample.response, sample.label, sample.metadata, **by_name)
            if inspect.isawaitable(result):
                result = _runner().run(_awaited(result))
        # user's code: whatever it raises is the failure of this sample
        except Exception as error:
            raise GraderFailed(f"{self.settings.function} raised {in_words(error)}") from error
        return verdict(result)


def enter(rules: Rules) -> None:
    """Import the function into this process, which then has no other use; raises GraderFailed.

    Modules in ``cwd`` are found first, and it becomes the working directory.
    """
    grader = Python(rules)
    settings = grader.settings
    limit_memory(settings.max_memory_bytes)
    refuse_other_version(grader, rules)
    try:
        os.chdir(settings.cwd)
    except OSError as error:
        raise GraderFailed(f"cannot enter cwd {settings.cwd}: {error.strerror}") from error
    sys.path.insert(0, settings.cwd)
    function = load(settings.function)
    if fault := _call_fault(function):
        raise GraderFailed(
            f"cannot use {settings.function}: it must take (response, reference, metadata), and "
            f"prompt if it wants that: {fault}"
        )


@functools.cache
def load(function: str) -> Callable[..., Any]:
    """Import ``module:function``; raises GraderFailed."""
    module, _, attribute = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    # user's code runs while it is imported
    except Exception as error:
        raise GraderFailed(f"cannot import {function}: {in_words(error)}") from error
    if not callable(found):
        raise GraderFailed(f"cannot use {function}: it is no function")
    return cast("Callable[..., Any]", found)


@functools.cache
def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether the function has a parameter called ``prompt``."""
    try:
        return "prompt" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False


def _call_fault(function: Callable[..., Any]) -> str | None:
    """Say why it cannot be called as ``Python.grade`` does, or None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as in takes_prompt
        return None
    try:
        signature.bind(None, None, None, **({"prompt": None} if takes_prompt(function) else {}))
    except TypeError as error:
        return str(error)
    return None


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls, so that a client of the user's can live on between them."""
    return asyncio.Runner()


async def _awaited(result: Any) -> Any:
    return await result


def module_digest(function: str, cwd: str) -> str:
    """Digest of the module's file, found without running any of it; "missing" without one."""
    path: list[str] | None = [cwd, *sys.path]
    spec = None
    name = ""
    for part in function.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is None and name == part:
                # what is installed for editing is on no path (and no code of it runs for this)
                spec = importlib.util.find_spec(name)
        except (ImportError, OSError, ValueError):
            return "missing"
        if spec is None:
            return "missing"
        path = list(spec.submodule_search_locations or [])
    return "missing" if spec is None or spec.origin is None else file_digest(Path(spec.origin))


def in_words(error: BaseException) -> str:
    """Give the type and message of an exception, on one line."""
    message = one_line(" ".join(str(error).split()))[:_MESSAGE_CHARS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
