"""What can be known before anything starts: shared by ``evald check`` and ``evald run``."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import msgspec

from evald.config import Config
from evald.errors import ConfigError, InvalidSnapshot, LedgerError
from evald.evals.sets import LoadedSet, load_set
from evald.results.modes import Modes
from evald.staging.intake import deletable
from evald.staging.validate import BaseModel

#: what a GPU machine has one of: NVIDIA, AMD, Windows' Linux.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The checked inputs of a daemon; ``notes`` are sentences that a person should read."""

    sets: list[LoadedSet]
    base: BaseModel
    notes: list[str]


def preflight(config: Config) -> Preflight:
    """Load data sets and the base model's shapes, look at disks and rights.

    Raises ConfigError with one sentence for each fault that would stop the daemon's work.
    """
    problems: list[str] = []
    sets = []
    for eval_set in config.eval:
        try:
            sets.append(load_set(eval_set))
        except ConfigError as error:
            problems += error.problems
    base = _base_model(config, problems)
    problems += _python(config)
    problems += _writable("staging.root", Path(config.staging.root), owned=config.staging.owned)
    problems += _writable("results.dir", Path(config.results.dir), owned=True)
    problems += _group(config)
    problems += _socket(config)
    if problems or base is None:
        raise ConfigError(problems)
    return Preflight(sets=sets, base=base, notes=_notes(config, base))


def _base_model(config: Config, problems: list[str]) -> BaseModel | None:
    model = Path(config.fleet.model)
    try:
        is_dir = model.is_dir()
    except OSError as error:
        problems.append(
            f"fleet.model: cannot look for {model}: {error.strerror}; let the daemon's user "
            f"(uid {os.getuid()}) into the directories above it"
        )
        return None
    if not is_dir:
        problems.append(
            f"fleet.model: {model} is not a directory; give the local directory of the base model "
            "(a hub id must be downloaded first)"
        )
        return None
    try:
        return BaseModel.read(model)
    except InvalidSnapshot as error:
        problems.append(f"fleet.model: {error.detail}")
        return None


def _python(config: Config) -> list[str]:
    python = config.fleet.python
    if python is None or shutil.which(python):
        return []
    return [f"fleet.python: {python} is not a program; give the interpreter that has SGLang"]


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
    path = config.status.socket
    longest = 107  # sun_path holds 108 bytes, one of them for the terminating zero
    if path is not None and len(os.fsencode(path)) > longest:
        return [f"status.socket: {path} is longer than {longest} bytes; choose a shorter path"]
    if path is not None and (faults := _writable("status.socket", Path(path).parent, owned=True)):
        return faults
    if not hasattr(socket, "AF_UNIX"):  # pragma: no cover (Linux always has it)
        return ["status.socket: this system has no unix sockets"]
    return []


def _notes(config: Config, base: BaseModel) -> list[str]:
    staging, dispatch = config.staging, config.dispatch
    count = staging.keep + dispatch.max_in_flight + 1
    peak = count * base.size_bytes
    notes = []
    notes.append(
        f"the staging root holds up to {count} snapshots (keep {staging.keep} + max_in_flight "
        f"{dispatch.max_in_flight} + 1 being written) of {_gigabytes(base.size_bytes)} each: "
        f"{_gigabytes(peak)} at the peak"
    )
    root = Path(staging.root)
    usage = shutil.disk_usage(_nearest(root))
    if usage.total < peak:
        notes.append(
            f"WARNING: the file system of {root} has {_gigabytes(usage.total)} in all, less than "
            "that peak; enlarge it, or lower staging.keep or dispatch.max_in_flight"
        )
    elif usage.free < peak:
        notes.append(
            f"WARNING: the file system of {root} has {_gigabytes(usage.free)} free, less than that "
            "peak"
        )
    if staging.max_bytes is not None and staging.max_bytes < peak:
        notes.append(
            f"WARNING: staging.max_bytes = {staging.max_bytes} is less than that peak: snapshots "
            "will be skipped with reason no_space"
        )
    if staging.owned and root.is_dir():
        sentence = deletable(root)
        if sentence is not None:
            notes.append(f"WARNING: {sentence}")
    has_gpu = any(Path(device).exists() for device in GPU_DEVICES)
    if config.fleet.device == "cuda" and config.engine_count and not has_gpu:
        notes.append(
            "WARNING: fleet.device is 'cuda', but this machine shows no GPU "
            f"({GPU_DEVICES[0]} is missing); set fleet.device = 'cpu' to try evald without one"
        )
    if config.engine_count == 0:
        notes.append("WARNING: no engines: snapshots are accepted and queue, nothing is evaluated")
    return notes


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
