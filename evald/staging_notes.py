"""What a person should know of the staging root before anything starts, one sentence each."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from evald.config import Config, Staging
from evald.errors import LedgerError
from evald.point import Kind, Outcome
from evald.presets import PRESETS
from evald.results.follow import read_records
from evald.results.records import Accepted, AnyRecord, PointRecord
from evald.staging.rights import deletable, user

#: what containers get when nobody asks for more.
_CONTAINER_SHM_BYTES = 64 << 20
#: logind spares the users of the system itself.
_FIRST_USER = 1000
#: points that tell how long one takes, and how often one comes; fewer are chance.
_ENOUGH_POINTS = 5
_NEWEST_POINTS = 50
#: the trainer waits at the cap: then points come exactly as often as they end.
_KEEPS_UP = 1.05


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where this machine keeps what the notes are about."""

    shared_memory: Path = Path("/dev/shm")  # noqa: S108 (the place itself, nothing is written)
    #: is there while systemd runs the machine.
    systemd: Path = Path("/run/systemd/system")
    #: of logind's configuration, the one that wins last.
    logind: tuple[Path, ...] = (
        Path("/usr/lib/systemd"),
        Path("/run/systemd"),
        Path("/etc/systemd"),
    )


def staging_notes(config: Config, snapshot_bytes: int | None, machine: Machine) -> list[str]:
    """Say what the root must hold, and what will go wrong; ``snapshot_bytes``: None if unknown."""
    staging, root = config.staging, Path(config.staging.root)
    notes = _preset_notes(staging)
    if staging.owned:
        if snapshot_bytes is not None:
            notes += _size_notes(config, snapshot_bytes)
        fault = deletable(root) if root.is_dir() else None
        if fault is not None:
            notes.append(f"WARNING: {fault}")
    if root.is_relative_to(machine.shared_memory):
        notes += _shared_memory_notes(machine)
    return [*notes, *_cadence_notes(config)]


def _preset_notes(staging: Staging) -> list[str]:
    """Say what a preset stands for, and who deletes where evald does not."""
    notes = []
    preset = PRESETS.get(staging.preset or "")
    if preset is not None:
        finished = preset.finished.format(marker=staging.marker)
        notes.append(
            f"staging.preset {staging.preset!r}: a snapshot is {staging.pattern} in the staging "
            f"root or in a run's folder there, and finished {finished}"
        )
    if preset is not None and preset.rotated:
        notes.append(
            "evald deletes nothing in the staging root: the trainer does, and a snapshot that is "
            "gone before its turn ends skipped (ckpt_missing); let it keep more if that happens"
        )
    elif not staging.owned:
        notes.append(
            "evald deletes nothing in the staging root (staging.owned = false): somebody else "
            "must, or it fills up"
        )
    return notes


def _size_notes(config: Config, snapshot_bytes: int) -> list[str]:
    """Say how much the staging root must hold, and whether it can."""
    staging, dispatch = config.staging, config.dispatch
    count = staging.keep + dispatch.max_in_flight + 1
    peak = count * snapshot_bytes
    notes = []
    notes.append(
        f"the staging root holds up to {count} snapshots (keep {staging.keep} + max_in_flight "
        f"{dispatch.max_in_flight} + 1 being written) of {_gigabytes(snapshot_bytes)} each: "
        f"{_gigabytes(peak)} at the peak"
    )
    root = Path(staging.root)
    usage = shutil.disk_usage(_nearest(root))
    least = staging.min_free_bytes
    if usage.total < peak + least:
        notes.append(
            f"WARNING: the file system of {root} has {_gigabytes(usage.total)} in all, less than "
            "that peak; enlarge it, or lower staging.keep or dispatch.max_in_flight"
        )
    elif usage.free < peak + least:
        notes.append(
            f"WARNING: the file system of {root} has {_gigabytes(usage.free)} free, less than that "
            "peak"
        )
    if staging.max_bytes is not None and staging.max_bytes < peak:
        notes.append(
            f"WARNING: staging.max_bytes = {staging.max_bytes} is less than that peak: snapshots "
            "will be skipped with reason no_space"
        )
    return notes


def _shared_memory_notes(machine: Machine) -> list[str]:
    """Say what becomes of a root in /dev/shm: containers give it little, logind empties it."""
    notes, shm = [], machine.shared_memory
    if shutil.disk_usage(_nearest(shm)).total <= _CONTAINER_SHM_BYTES:
        notes.append(
            f"WARNING: {shm} has 64 MiB, which is a container's default and holds no snapshot; "
            "start the container with more (docker: --shm-size=200g or --ipc=host; Kubernetes: an "
            f"emptyDir of medium Memory at {shm}), or choose another staging.root"
        )
    me = os.geteuid()
    if machine.systemd.exists() and me >= _FIRST_USER and _removes_ipc(machine.logind):
        notes.append(
            f"WARNING: logind removes all that {user(me)} has in {shm} when its last session ends "
            f"(RemoveIPC=yes, the default), and with it the snapshots; set RemoveIPC=no in "
            f"{machine.logind[-1]}/logind.conf, or run trainer and evald as a system user"
        )
    return notes


def _removes_ipc(folders: Iterable[Path]) -> bool:
    """Read ``RemoveIPC`` as logind does: the main file first, then the pieces by name; else yes."""
    folders = list(folders)
    main = [path for folder in reversed(folders) if (path := folder / "logind.conf").is_file()]
    pieces = {
        path.name: path for folder in folders for path in (folder / "logind.conf.d").glob("*.conf")
    }
    value = "yes"
    for path in [*main[:1], *(pieces[name] for name in sorted(pieces))]:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, given = line.partition("=")
            if key.strip() == "RemoveIPC" and given.strip():
                value = given.strip()
    return value.lower() in {"yes", "y", "true", "t", "on", "1"}


def _cadence_notes(config: Config) -> list[str]:
    """Say if points have come faster than the eval sets could be measured, by the ledger."""
    try:
        records = read_records(config.results_file)
    except (LedgerError, OSError):
        return []  # whoever opens it for writing says what is wrong with it
    of_run = [record for record in records if _of_run(record, config.run)]
    measured = [
        record
        for record in of_run
        if isinstance(record, PointRecord) and record.outcome is not Outcome.SKIPPED
    ]
    took = list(_engine_seconds(measured))[-_NEWEST_POINTS:]
    apart = list(_gaps([one.time for one in of_run if isinstance(one, Accepted)]))[-_NEWEST_POINTS:]
    if len(took) < _ENOUGH_POINTS or len(apart) < _ENOUGH_POINTS:
        return []
    point_s, gap_s = statistics.median(took), statistics.median(apart)
    if point_s <= gap_s * _KEEPS_UP:
        return []
    sentence = (
        f"WARNING: the eval sets do not keep up: by the ledger a point of run {config.run} takes "
        f"the engines for {point_s:.3g} s, and one came every {gap_s:.3g} s (medians of the newest "
        f"{len(took)}); evaluate every {point_s / gap_s:.1f} times as many steps, make the sets "
        "smaller, or add engines"
    )
    return [sentence]


def _of_run(record: AnyRecord, run: str) -> bool:
    return (
        isinstance(record, Accepted | PointRecord)
        and record.run == run
        and record.kind is Kind.STEP
    )


def _engine_seconds(points: Iterable[PointRecord]) -> Iterator[float]:
    """Give the time that each point adds: points may overlap, so the end before it counts, too."""
    before = 0.0
    for point in points:
        took = point.timings.pin_s + point.timings.evaluate_s
        alone = point.time - before
        # else the clock was set back
        yield min(took, alone) if alone > 0 else took
        before = point.time


def _gaps(times: list[float]) -> Iterator[float]:
    for earlier, later in itertools.pairwise(times):
        if later > earlier:  # else the clock was set back
            yield later - earlier


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
