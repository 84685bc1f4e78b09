"""The generate functions of one point's sets: which process runs a sample, and what its end costs.

A process that dies, or stands still, takes all its samples with it. The one that was at work is to
blame (``board``) and fails; the others are asked again. Where nobody can tell whose fault it was,
each of them is asked again alone in a process, so that it costs nobody else a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from evald.config import EvalSet
from evald.errors import GenerationFailed
from evald.evals.custom.calls import Lost, Outcome, Serve
from evald.evals.custom.launch import NotStarted, launch
from evald.evals.custom.messages import Setup
from evald.evals.custom.process import FunctionProcess
from evald.evals.custom.settings import function_settings, function_version
from evald.evals.graders import opening_tag
from evald.evals.graders.external import grader_env
from evald.evals.prompts import ModelLimits, TokenizerFiles
from evald.evals.rows import Question
from evald.evals.sampling import base_sampling

#: processes that a sample may lose through others before it fails, too.
MAX_LOSSES = 5
#: starts that fail in a row before a set's function is given up for the rest of the point.
MAX_FAILED_STARTS = 3
#: processes that end in a row without having finished one sample, likewise.
MAX_BARREN = 10


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a set."""

    eval_set: EvalSet
    question: Question
    sample: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """With what the prompts of a set's function become token ids."""

    files: TokenizerFiles
    limits: ModelLimits


class Functions:
    """Runs the generate functions of one point's sets.

    A set's processes are started when its first sample comes, and end with the point: nothing that
    a function keeps can get into the next one. ``directory`` gets a directory of logs for each set;
    ``tokens`` and ``versions`` are by set; the latter says what its function was when the set was
    loaded.
    """

    def __init__(
        self,
        directory: Path,
        *,
        environ: Mapping[str, str],
        tokens: Mapping[str, Tokens],
        versions: Mapping[str, str],
    ) -> None:
        self._directory = directory
        self._environ = environ
        self._tokens = tokens
        self._versions = versions
        self._sets: dict[str, _SetFunctions] = {}

    async def call(self, work: Work, serve: Serve, *, timeout_s: float) -> Outcome:
        """Have one sample answered; ``timeout_s`` runs from when a process has it.

        Raises GenerationFailed for the sample's own fault, and whatever ends the point.
        """
        name = work.eval_set.name
        if name not in self._sets:
            settings = function_settings(work.eval_set)
            self._sets[name] = _SetFunctions(
                work.eval_set,
                _setup(work.eval_set, self._tokens[name]),
                n_processes=settings.processes,
                directory=self._directory / name,
                env=grader_env(self._environ, settings.pass_env),
                version=self._versions[name],
            )
        return await self._sets[name].call(work, serve, timeout_s)

    async def close(self) -> None:
        """End all processes; none is left afterwards."""
        sets, self._sets = self._sets, {}
        await asyncio.gather(*(one.close() for one in sets.values()))


def _setup(eval_set: EvalSet, tokens: Tokens) -> Setup:
    files, limits = tokens.files, tokens.limits
    settings = function_settings(eval_set)
    return Setup(
        function=str(eval_set.function),
        cwd=settings.cwd,
        config=settings.config,
        sampling=base_sampling(eval_set),
        apply_chat_template=eval_set.apply_chat_template,
        template_kwargs=eval_set.apply_chat_template_kwargs,
        opening_tag=opening_tag(eval_set.thinking_end) if eval_set.thinking == "auto" else None,
        tokenizer=files.content,
        template=files.template.source,
        special_tokens=files.template.special_tokens,
        vocab_size=limits.vocab_size,
        context_len=limits.context_len,
    )


class _SetFunctions:
    """The processes of one set."""

    def __init__(
        self,
        eval_set: EvalSet,
        setup: Setup,
        *,
        n_processes: int,
        directory: Path,
        env: Mapping[str, str],
        version: str,
    ) -> None:
        self._eval_set = eval_set
        self._setup = setup
        self._directory = directory
        self._env = env
        self._version = version
        self._lanes = [_Lane(self._start, f"process-{i}") for i in range(n_processes)]
        #: one sample at a time.
        self._alone = _Lane(self._start, "alone")
        self._alone_turn = asyncio.Lock()
        self._failed_starts = 0
        self._problem = ""

    async def call(self, work: Work, serve: Serve, timeout_s: float) -> Outcome:
        losses = 0
        while True:
            lane = min(self._lanes, key=lambda lane: lane.n_running)
            try:
                return await lane.call(work, serve, timeout_s)
            except Lost as lost:
                losses += 1
                if lost.is_own or losses > MAX_LOSSES:
                    raise self._failed(lost) from lost
                if lost.is_unclear:
                    break
        async with self._alone_turn:
            try:
                return await self._alone.call(work, serve, timeout_s)
            except Lost as lost:
                raise self._failed(lost) from lost

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in (*self._lanes, self._alone)))

    def _failed(self, lost: Lost) -> GenerationFailed:
        return GenerationFailed("error", f"{self._setup.function}: {lost.detail}")

    async def _start(self, lane: str) -> FunctionProcess:
        """Start a process; raises GenerationFailed, at once where it has failed too often."""
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise GenerationFailed("error", self._problem)
        try:
            await self._refuse_other_version()
            launched = await launch(self._setup, env=self._env, directory=self._directory / lane)
        except NotStarted as fault:
            self._failed_starts += 1
            self._problem = f"cannot start {self._setup.function}: {fault}"
            raise GenerationFailed("error", self._problem) from fault
        self._failed_starts = 0
        return FunctionProcess(self._setup, launched)

    async def _refuse_other_version(self) -> None:
        # scores of two versions under one name would be no curve
        if self._version != await asyncio.to_thread(function_version, self._eval_set):
            raise NotStarted("its file has changed since evald started; restart evald")


class _Lane:
    """A place for one process after another."""

    def __init__(self, start: Callable[[str], Awaitable[FunctionProcess]], name: str) -> None:
        self.n_running = 0
        self._name = name
        self._start = start
        self._starting = asyncio.Lock()
        self._process: FunctionProcess | None = None
        self._barren = 0

    async def call(self, work: Work, serve: Serve, timeout_s: float) -> Outcome:
        self.n_running += 1
        try:
            process = await self._ready()
            return await process.call(work.question, work.sample, serve, timeout_s=timeout_s)
        finally:
            self.n_running -= 1

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _ready(self) -> FunctionProcess:
        """Return a process that takes samples; raises GenerationFailed."""
        async with self._starting:
            if self._process is not None and self._process.usable:
                return self._process
            if self._process is not None:
                self._barren = 0 if self._process.n_done else self._barren + 1
                await self.close()
            if self._barren >= MAX_BARREN:
                raise GenerationFailed(
                    "error",
                    f"the last {MAX_BARREN} processes of the function died before they had "
                    "finished a single sample; no more are started for this point",
                )
            self._process = await self._start(self._name)
            return self._process
