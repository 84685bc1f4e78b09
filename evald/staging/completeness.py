"""When a directory is a finished snapshot: the one question that scan and watch ask.

Most trainers write a marker last. Some write none; for those another file tells, and it must not be
fooled by a checkpoint that is being overwritten (its old file still tells of the old weights) or
deleted. What is half-written is not finished yet, and never invalid.
"""

from __future__ import annotations

import json
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

from evald.config import Staging
from evald.presets import PRESETS
from evald.staging.files import open_file

#: device, inode, and for a file also its mtime in ns and size: "still the same one".
Identity = tuple[int, ...]

#: a Trainer's state holds all that it has logged.
_MAX_BYTES = 256 << 20
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class Proof(msgspec.Struct, frozen=True):
    """A directory is finished."""

    #: tells this finished state from all others.
    identity: Identity
    #: when it was finished.
    mtime_ns: int


class Doubt(msgspec.Struct, frozen=True):
    """A directory looks finished and cannot be trusted; for people if it stays so."""

    sentence: str


class Completeness(Protocol):
    """A rule; every method blocks for a few calls of the file system."""

    #: the file may be a manifest.
    has_manifest: bool
    #: nobody marks the directory, or somebody else deletes it: look twice (``settle.py``).
    settles: bool

    def hint(self, directory: Path) -> Identity | None:
        """Return the state of the file that tells, by one stat: another one is worth a scan."""
        ...

    def look(self, directory: Path, step: int) -> Proof | Doubt | None:
        """Say whether it is finished; raises OSError as a stat of the file does."""
        ...


def completeness(config: Staging) -> Completeness:
    """Make the rule of the config's preset; without one, the marker tells."""
    preset = PRESETS.get(config.preset or "")
    match preset.rule if preset else "marker":
        case "trainer_state":
            return TrainerState(config.marker)
        case "latest_file":
            return LatestFile(config.marker, depth=len(Path(config.pattern).parts))
        case "weights_index":
            return WeightsIndex(config.marker)
        case "fresh_marker":
            return MarkerFile(config.marker, fresh=True)
        case _:
            return MarkerFile(config.marker)


def file_identity(status: os.stat_result) -> Identity:
    """Tell one state of one file from all others."""
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


class MarkerFile:
    """A file that is there for nothing but that.

    ``fresh``: the trainer does not remove it before it writes the directory once more, so weights
    that are newer are of an unfinished export.
    """

    has_manifest = True

    def __init__(self, name: str, *, fresh: bool = False) -> None:
        self._name = name
        self._fresh = fresh
        self.settles = fresh

    def hint(self, directory: Path) -> Identity | None:
        """Return the marker's state."""
        return _state(directory / self._name)

    def look(self, directory: Path, step: int) -> Proof | Doubt | None:  # noqa: ARG002 (any step)
        """Find it finished once the marker is there."""
        marker = directory / self._name
        status = marker.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        doubt = _newer_weights(directory, marker, status) if self._fresh else None
        return doubt or Proof(file_identity(status), status.st_mtime_ns)


class WeightsIndex:
    """The index of the shards comes last, and goes first when the directory is written again."""

    has_manifest = False
    settles = True

    def __init__(self, name: str) -> None:
        self._name = name

    def hint(self, directory: Path) -> Identity | None:
        """Return the index's state."""
        return _state(directory / self._name)

    def look(self, directory: Path, step: int) -> Proof | Doubt | None:  # noqa: ARG002 (any step)
        """Find it finished once the index is whole; index and shards are compared later."""
        index = directory / self._name
        status = index.stat()
        try:
            if not _is_index(index, file_identity(status)):
                return None
        except PermissionError as error:
            return _unreadable(directory, index, error)
        return Proof(file_identity(status), status.st_mtime_ns)


class TrainerState:
    """transformers' Trainer writes its state last, in place, and leaves an old one there meanwhile.

    So it must be whole JSON, tell the directory's own step, and be at least as new as the weights.
    """

    has_manifest = False
    settles = True

    def __init__(self, name: str) -> None:
        self._name = name

    def hint(self, directory: Path) -> Identity | None:
        """Return the state of the state."""
        return _state(directory / self._name)

    def look(self, directory: Path, step: int) -> Proof | Doubt | None:
        """Find it finished once the state tells so, and no weights are newer."""
        state = directory / self._name
        status = state.stat()
        try:
            if _global_step(state, file_identity(status)) != step:
                return None
        except PermissionError as error:
            return _unreadable(directory, state, error)
        doubt = _newer_weights(directory, state, status)
        return doubt or Proof(file_identity(status), status.st_mtime_ns)


class LatestFile:
    """verl writes the number of the last whole checkpoint into one file beside them all.

    A step up to that number is finished, unless anything in its directory is newer than the file:
    after a resume from an earlier step the number is of an abandoned one until the next save is
    whole. ``depth``: components of the pattern, up to the folder with the file.
    """

    has_manifest = False
    settles = True

    def __init__(self, name: str, *, depth: int) -> None:
        self._name = name
        self._depth = depth

    def hint(self, directory: Path) -> Identity | None:
        """Return the file's state: it is the same one for all steps."""
        return _state(self._file(directory))

    def look(self, directory: Path, step: int) -> Proof | Doubt | None:
        """Find it finished once the file tells so, and nothing is newer."""
        latest = self._file(directory)
        status = latest.stat()
        own = directory.stat()
        try:
            said = _number(latest, file_identity(status))
        except PermissionError as error:
            return _unreadable(directory, latest, error)
        if said is None or step > said:
            return None
        found = [("it", own), *_files(directory)]
        doubt = _newer(directory, found, latest, status)
        if doubt is not None:
            return doubt
        # the file changes with every save: only the directory tells what state it is in
        times = [one.st_mtime_ns for _, one in found]
        sizes = [one.st_size for _, one in found]
        return Proof((len(found), sum(sizes), sum(times)), max(times))

    def _file(self, directory: Path) -> Path:
        return directory.parents[self._depth - 1] / self._name


# --- looking into files ------------------------------------------------------------------------


def _state(path: Path) -> Identity | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (asked every 20 ms: without Path's detours)
    except OSError:
        return None
    return file_identity(status) if stat.S_ISREG(status.st_mode) else None


# read once for each ``identity``, which is there for nothing else; an OSError is not remembered


@lru_cache(maxsize=4096)
def _global_step(path: Path, identity: Identity) -> object:  # noqa: ARG001
    return _fields(path).get("global_step")


@lru_cache(maxsize=4096)
def _is_index(path: Path, identity: Identity) -> bool:  # noqa: ARG001
    return "weight_map" in _fields(path)


@lru_cache(maxsize=64)
def _number(path: Path, identity: Identity) -> int | None:  # noqa: ARG001
    text = _content(path).strip()
    return int(text) if text.isdigit() and len(text) <= 15 else None  # noqa: PLR2004 (as in names)


def _fields(path: Path) -> dict[str, object]:
    """Return the fields of a JSON file; none while it is not whole."""
    try:
        # not msgspec: a loss that is NaN stands in there as NaN, which Python alone understands
        parsed = json.loads(_content(path))
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(_MAX_BYTES)


def _files(directory: Path, endings: tuple[str, ...] = ("",)) -> list[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        named = [entry for entry in entries if entry.name.endswith(endings)]
        return [(entry.name, entry.stat()) for entry in named]


def _newer_weights(directory: Path, last: Path, status: os.stat_result) -> Doubt | None:
    return _newer(directory, _files(directory, _WEIGHTS), last, status)


def _newer(
    directory: Path,
    files: list[tuple[str, os.stat_result]],
    last: Path,
    status: os.stat_result,
) -> Doubt | None:
    for name, one in files:
        if one.st_mtime_ns > status.st_mtime_ns:
            return Doubt(
                f"cannot take snapshot {directory}: {name} is newer than {last.name}, which is "
                "written last, so it is being written or was left half-written; if it is whole, "
                f"touch {last} (copies keep their times with cp -a and rsync -a)"
            )
    return None


def _unreadable(directory: Path, last: Path, error: OSError) -> Doubt:
    return Doubt(
        f"cannot tell whether snapshot {directory} is finished: cannot read {last}: "
        f"{error.strerror}; the trainer must write it with mode 0644 (chmod 0644)"
    )
