"""Everything that must be known before the first engine of a fleet is launched.

Asks the installed SGLang for its arguments, the rollout engines for theirs, and nvidia-smi for
GPUs; all of it blocks.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.config import Fleet
from evald.engines.argument import ServerArguments
from evald.engines.environment import engine_env
from evald.engines.flags import launch_command
from evald.engines.gpus import (
    GpuProblem,
    foreign_sentences,
    gpu_processes,
    known_gpus,
    visible_gpus,
)
from evald.engines.inherit import Inherited, read_inherited
from evald.engines.plan import EnginePlan, engine_plan
from evald.engines.server_args import ask_server_arguments, default_cache_dir
from evald.engines.settings import check_settings, explain
from evald.errors import ConfigError

#: what a live rollout engine said, kept beside the engines' logs for a restart without it.
REMEMBERED = "inherited.json"


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a fleet; ``notes`` are sentences that a person should read."""

    #: whether engines are started at all is decided here: when there are any.
    engines: list[EnginePlan]
    #: None: the installed SGLang could not be asked.
    arguments: ServerArguments | None
    #: environment of each engine, beside its GPUs.
    env: dict[str, str]
    notes: list[str]

    @property
    def context_len(self) -> int | None:
        """Tokens of a prompt with its answer on every engine, if the config sets them."""
        lengths = [plan.context_len for plan in self.engines if plan.context_len is not None]
        return min(lengths, default=None)


class _Remembered(msgspec.Struct, frozen=True):
    url: str
    inherited: Inherited


def prepare_fleet(
    fleet: Fleet,
    *,
    environ: Mapping[str, str],
    engines_dir: Path | None = None,
) -> FleetPlan:
    """Plan the engines of ``fleet`` and check what each will be launched with. Blocks.

    The first call for an SGLang version imports it in a subprocess: seconds to minutes.
    ``environ``: evald's own environment, of which engines get a part. In ``engines_dir`` the answer
    of a live rollout engine is remembered. Raises ConfigError with one sentence for each fault.
    """
    env = engine_env(fleet, environ)
    if not engine_plan(fleet):
        return FleetPlan(engines=[], arguments=None, env=env, notes=[])
    notes: list[str] = []
    arguments = _arguments(fleet, env, default_cache_dir(environ), notes)
    inherited = _inherited(fleet, arguments, engines_dir, environ, notes)
    gpus = _gpus(fleet, environ) if fleet.device == "cuda" else None
    plans = engine_plan(fleet, gpus=gpus, inherited=inherited, arguments=arguments)
    problems: list[str] = []
    for plan in _one_of_each_group(plans):
        if arguments is not None:
            found = check_settings(plan.resolved.settings, arguments)
            problems += [sentence for sentence in found if sentence not in problems]
    if problems:
        raise ConfigError(problems)
    if fleet.device == "cuda":
        used = [gpu for plan in plans for gpu in plan.gpus]
        foreign = foreign_sentences(used, gpu_processes(), known_gpus())
        notes += [f"WARNING: {sentence}" for sentence in foreign]
    return FleetPlan(engines=plans, arguments=arguments, env=env, notes=notes)


def explain_fleet(fleet: Fleet, plan: FleetPlan) -> list[str]:
    """Return lines for ``evald check``: each engine's command line, and where its values are from.

    Port, nonce and the file with the API key are new for each launch: placeholders stand for them.
    """
    lines = []
    for engine in plan.engines:
        command = launch_command(
            fleet,
            engine,
            port=0,
            nonce="NONCE",
            config_file=Path("KEY.yaml"),
            env=plan.env,
            arguments=plan.arguments,
        )
        argv = command.argv.copy()
        argv[argv.index("--port") + 1] = "PORT"
        where = f" on GPU {', '.join(engine.gpus)}" if engine.gpus else ""
        lines += [f"engine {engine.name}{where}:", f"  {shlex.join(argv)}"]
    for engine in _one_of_each_group(plan.engines):
        group = f"group {engine.group}" if engine.group else "all engines"
        lines += [f"server arguments of {group}:"]
        lines += [f"  {line}" for line in explain(engine.resolved)]
    return lines


def _arguments(
    fleet: Fleet, env: Mapping[str, str], cache_dir: Path | None, notes: list[str]
) -> ServerArguments | None:
    try:
        return ask_server_arguments(
            fleet.python or sys.executable,
            cpu=fleet.device == "cpu",
            env=env,
            cache_dir=cache_dir,
        )
    except ConfigError as error:
        if fleet.inherit is not None:
            raise  # only SGLang itself can read another server's arguments
        reasons = "; ".join(error.problems)
        notes.append(f"WARNING: names and types of server arguments are not checked: {reasons}")
        return None


def _inherited(
    fleet: Fleet,
    arguments: ServerArguments | None,
    engines_dir: Path | None,
    environ: Mapping[str, str],
    notes: list[str],
) -> Inherited | None:
    """Read [fleet.inherit]; a live engine that is away now is known from the last time."""
    if fleet.inherit is None or arguments is None:
        return None
    url = fleet.inherit.url
    remembered = None if engines_dir is None or url is None else engines_dir / REMEMBERED
    try:
        inherited = read_inherited(fleet.inherit, base=None, arguments=arguments, environ=environ)
    except ConfigError as error:
        last = None if remembered is None else _read_remembered(remembered, url)
        if last is None:
            raise
        reasons = "; ".join(error.problems)
        notes.append(f"WARNING: server arguments are inherited from {remembered}: {reasons}")
        # what the config leaves out is the config's, not the engine's
        return msgspec.structs.replace(last, without=fleet.inherit.without)
    if remembered is not None and url is not None:
        with contextlib.suppress(OSError):  # only a later start without that engine would need it
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.write_bytes(msgspec.json.encode(_Remembered(url, inherited)))
    return inherited


def _read_remembered(path: Path, url: str | None) -> Inherited | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        last = msgspec.json.decode(path.read_bytes(), type=_Remembered)
        return last.inherited if last.url == url else None
    return None


def _gpus(fleet: Fleet, environ: Mapping[str, str]) -> list[str] | None:
    try:
        return visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), known_gpus())
    except GpuProblem as error:
        raise ConfigError([f"fleet.device: {error}; fleet.device is {fleet.device!r}"]) from error


def _one_of_each_group(plans: list[EnginePlan]) -> list[EnginePlan]:
    return list({plan.group: plan for plan in reversed(plans)}.values())[::-1]
