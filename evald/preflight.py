"""What can be known before anything starts: shared by ``evald check`` and ``evald run``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.alerts.webhook import webhook_target
from evald.config import Attached, Config, Shared
from evald.config_check_alerts import metric_notes
from evald.engines.prepare import FleetPlan, prepare_fleet
from evald.errors import ConfigError, EvaldError, InvalidSnapshot, LedgerError
from evald.evals.curve import CHANGED_REMEDY, CurveWatch
from evald.evals.procedural.made import library_notes
from evald.evals.ready_sets import ready_sets
from evald.evals.sampling import sampling_notes
from evald.evals.sets import LoadedSet
from evald.results.follow import read_records
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.staging.validate import BaseModel
from evald.staging_notes import Machine, staging_notes
from evald.status.listen import tcp_listener
from evald.status.sockets import socket_path

#: files that trainers keep beside the weights of a checkpoint that they resume from.
TRAINING_STATE = (
    "optimizer*.pt",
    "scheduler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    "latest_checkpointed_iteration.txt",
    "*.distcp",
    "global_step*/*_optim_states.pt",
)

#: what a GPU machine has one of: NVIDIA, AMD, Windows' Linux.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The checked inputs of a daemon; ``notes`` are sentences that a person should read."""

    sets: list[LoadedSet]
    #: None: a black box whose config names no model.
    base: BaseModel | None
    #: the engines to start, with all that they are launched with; None: another posture.
    fleet: FleetPlan | None = None
    #: the environment as it was at the start: keys, and what black boxes inherit, come from it.
    environ: dict[str, str]
    notes: list[str]

    @property
    def context_len(self) -> int | None:
        """Tokens of a prompt with its answer, if the engines are told; else the model's own."""
        return None if self.fleet is None else self.fleet.context_len


def preflight(
    config: Config, *, environ: Mapping[str, str] = os.environ, keep_data: bool = False
) -> Preflight:
    """Load data sets and the base model's shapes, plan the engines, look at disks and rights.

    Blocks; not for a thread that runs an event loop. ``environ`` is read here, once, for all that
    is started later. ``keep_data``: generated data sets go into results.dir, where a daemon needs
    them. Raises ConfigError with one sentence for each fault that would stop the daemon's work.
    """
    environ = dict(environ)
    problems = _group(config)
    modes = Modes() if problems else Modes.of(config.results)
    sets, faults = ready_sets(
        config.eval,
        environ=environ,
        data_dir=Path(config.results.dir) / "data",
        keep_data=keep_data,
        modes=modes,
    )
    problems += faults
    base = _base_model(config, problems)
    problems += _python(config)
    problems += _writable("staging.root", Path(config.staging.root), owned=config.staging.owned)
    problems += _writable("results.dir", Path(config.results.dir), owned=True)
    if config.keep_best is not None:
        problems += _writable("keep_best.dir", Path(config.keep_best.dir), owned=True)
    problems += _socket(config)
    problems += _token(config, environ)
    problems += _webhook(config, environ)
    problems += _reused_root(config)
    fleet = None
    if config.fleet is not None:
        try:
            engines_dir = Path(config.results.dir) / "engines"
            fleet = prepare_fleet(config.fleet, environ=environ, engines_dir=engines_dir)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    changed = _changed_sets(config, sets)
    if changed and config.dispatch.on_set_change == "refuse":
        raise ConfigError([f"{sentence}; {CHANGED_REMEDY}" for sentence in changed])
    notes = _notes(config, base) + (fleet.notes if fleet is not None else [])
    notes += library_notes(config.eval)
    # (a procedural set is an ordinary one by now)
    notes += sampling_notes([one.eval_set for one in sets])
    notes += metric_notes(config)
    notes += [f"WARNING: {sentence}; its curve breaks" for sentence in changed]
    return Preflight(sets=sets, base=base, fleet=fleet, environ=environ, notes=notes)


def _changed_sets(config: Config, sets: list[LoadedSet]) -> list[str]:
    """Compare the sets with what the ledger says of this run, unless that is over."""
    if not sets:
        return []
    index = PointIndex()
    try:
        for record in read_records(config.results_file):
            index.apply(record)
    except (LedgerError, OSError):
        return []  # whoever opens it for writing says what is wrong with it
    if index.run_ended(config.run):
        return []
    return CurveWatch(index, config.dispatch.on_set_change).changed(config.run, sets)


def _base_model(config: Config, problems: list[str]) -> BaseModel | None:
    model = config.model_dir
    posture = type(config.posture).__name__.lower()
    if model is None:
        return None
    try:
        is_dir = model.is_dir()
    except OSError as error:
        problems.append(
            f"{posture}.model: cannot look for {model}: {error.strerror}; let the daemon's user "
            f"(uid {os.getuid()}) into the directories above it"
        )
        return None
    if not is_dir:
        problems.append(
            f"{posture}.model: {model} is not a directory; give the local directory of the base "
            "model (a hub id must be downloaded first)"
        )
        return None
    try:
        return BaseModel.read(model)
    except InvalidSnapshot as error:
        problems.append(f"{posture}.model: {error.detail}")
        return None


def _python(config: Config) -> list[str]:
    posture = config.posture
    if isinstance(posture, Attached | Shared):
        return []
    python = posture.python
    if python is None or shutil.which(python):
        return []
    key = f"{type(posture).__name__.lower()}.python"
    return [f"{key}: {python} is not a program; give the interpreter of the engines"]


def _writable(key: str, directory: Path, *, owned: bool) -> list[str]:
    """Look at the nearest directory that exists: the daemon makes what is missing below it."""
    at = _nearest(directory)
    if not at.is_dir():
        return [f"{key}: {at} is not a directory; choose another path, or remove the file"]
    needed = os.W_OK | os.X_OK if owned else os.R_OK | os.X_OK
    if not os.access(at, needed):
        what = "write to" if owned else "read"
        return [
            f"{key}: the daemon's user (uid {os.getuid()}) may not {what} {at}; change its mode"
        ]
    return []


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists and can be looked at."""
    while path != path.parent:
        try:
            if path.exists():
                return path
        except OSError:
            pass  # a closed directory hides it: that one is what a person must hear of
        path = path.parent
    return path


def _group(config: Config) -> list[str]:
    try:
        Modes.of(config.results)
    except LedgerError as error:
        return [f"results.group: {error}"]
    return []


def _socket(config: Config) -> list[str]:
    try:
        socket_path(config)
    except ConfigError as error:
        return error.problems
    path = config.status.socket
    return [] if path is None else _writable("status.socket", Path(path).parent, owned=True)


def _token(config: Config, environ: Mapping[str, str]) -> list[str]:
    try:
        tcp_listener(config.status, environ)
    except ConfigError as error:
        return error.problems
    return []


def _webhook(config: Config, environ: Mapping[str, str]) -> list[str]:
    if config.webhook is None:
        return []
    try:
        webhook_target(config.webhook, environ)
    except ConfigError as error:
        return error.problems
    return []


def _reused_root(config: Config) -> list[str]:
    """Refuse to own a directory from which the trainer itself resumes: evald would delete it.

    Raises EvaldError when it cannot be read: then nobody knows.
    """
    root = Path(config.staging.root)
    if not config.staging.owned or _nearest(root) != root:
        return []
    name = Path(config.staging.pattern).parts[0].replace("{step}", "*")
    for pattern in TRAINING_STATE:
        for prefix in ("", f"{name}/"):
            try:
                found = next(root.glob(prefix + pattern), None)
            except OSError as error:
                raise EvaldError(
                    f"cannot look into staging root {root}: {error.strerror}; start evald again "
                    "when it can be read"
                ) from error
            if found is not None:
                sentence = (
                    f"staging.root: {found} looks like training state that the trainer resumes "
                    "from, and evald deletes in an owned root; set staging.owned = false (as "
                    "staging.preset does), or choose a directory for snapshots alone"
                )
                return [sentence]
    return []


def _notes(config: Config, base: BaseModel | None) -> list[str]:
    notes = staging_notes(config, None if base is None else base.size_bytes, Machine())
    has_gpu = any(Path(device).exists() for device in GPU_DEVICES)
    if config.fleet is not None and config.fleet.device == "cuda" and not has_gpu:
        notes.append(
            "WARNING: fleet.device is 'cuda', but this machine shows no GPU "
            f"({GPU_DEVICES[0]} is missing); set fleet.device = 'cpu' to try evald without one"
        )
    if config.fleet is not None and config.engine_count == 0:
        notes.append("WARNING: no engines: every point will end skipped (unhealthy)")
    if config.dispatch.rolling and config.dispatch.max_in_flight == 1 and config.engine_count > 1:
        notes.append(
            "points do not overlap, because max_in_flight is 1: engines wait for the last answers "
            "of each; with 2 to 4 they go on to the next point"
        )
    return notes
