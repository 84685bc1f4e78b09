"""What is in the staging root right now: an idempotent look that is cheap enough for every event.

One directory listing for the root and for each run's folder, and one stat for each marker. Hidden
names are ignored. Of content, only a file that stands in for a marker is read (``completeness``).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from evald.config import Staging
from evald.staging.completeness import Doubt, Identity, completeness, file_identity
from evald.staging.manifest import RUN_NAME

_STEP = "{step}"
#: lies in the root of an ext file system, closed, and is nobody's run.
_LOST_AND_FOUND = "lost+found"


class FoundSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A directory whose name fits the pattern and that is finished."""

    directory: Path
    step: int
    #: name of the run's folder; None directly in the root.
    folder_run: str | None
    #: of the directory, and of what tells that it is finished.
    identity: Identity
    marker_mtime_ns: int


class Unfinished(msgspec.Struct, frozen=True):
    """A directory whose name fits the pattern and that is not finished."""

    step: int
    #: name of the run's folder; None directly in the root.
    folder_run: str | None


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """A word of the trainer: ``step_41.skip``, ``*.request`` or ``run.end``."""

    kind: Literal["skip", "request", "run_end"]
    path: Path
    #: of a skip's name.
    step: int | None
    folder_run: str | None
    identity: Identity
    mtime_ns: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """All that one scan saw."""

    #: folders in which snapshots can appear -> device, inode; empty without a root.
    folders: dict[Path, Identity]
    #: finished snapshots, oldest marker first.
    marked: list[FoundSnapshot]
    #: directories (perhaps still to be made) that are not finished.
    unmarked: dict[Path, Unfinished]
    #: those of them that look finished all the same -> why they are not taken.
    doubtful: dict[Path, str] = {}
    #: directories in which evald may not even look for the marker.
    closed: dict[Path, Unfinished] = {}
    #: folders that may hold snapshots, and evald may not look into.
    closed_folders: list[Path] = []
    #: directories with a marker whose names do not fit the pattern.
    misnamed: list[Path] = []
    files: list[FoundFile]
    #: of the root's file system: what evald's user may still write, and its size.
    free_bytes: int
    total_bytes: int = 0


class Layout:
    """Names in a staging root, the config's ``pattern`` and ``marker``, and when one is finished.

    A pattern can have several components (``global_step_{step}/actor/huggingface``); those after
    the first with ``{step}`` are known once the step is.
    """

    def __init__(self, config: Staging) -> None:
        self.root = Path(config.root)
        self.marker = config.marker
        self.completeness = completeness(config)
        parts = Path(config.pattern).parts
        first = next(i for i, part in enumerate(parts) if _STEP in part)
        #: folders on the way, and the component that has the step.
        self.heads = [_compiled(part) for part in parts[: first + 1]]
        self.tail = parts[first + 1 :]
        # a skip file lies flat in the root or the run's folder
        self.skip = _compiled("--".join(parts) + ".skip")

    def is_linked(self, directory: Path) -> bool:
        """Tell whether the directory, or a folder on the way from the root, is a link."""
        below = directory.relative_to(self.root).parts
        return any(self.root.joinpath(*below[: i + 1]).is_symlink() for i in range(len(below)))


def scan(layout: Layout) -> Found:
    """Look at everything; a missing root has no folders. Raises OSError of the root itself."""
    look = _Look(layout)
    try:
        look.folder(layout.root, None)
        disk = os.statvfs(layout.root)
    except FileNotFoundError:
        return Found(folders={}, marked=[], unmarked={}, files=[], free_bytes=0)
    look.marked.sort(key=lambda found: (found.marker_mtime_ns, found.step))
    look.files.sort(key=lambda found: (found.mtime_ns, found.path))
    return Found(
        folders=look.folders,
        marked=look.marked,
        unmarked=look.unmarked,
        doubtful=look.doubtful,
        closed=look.closed,
        closed_folders=look.closed_folders,
        misnamed=look.misnamed,
        files=look.files,
        free_bytes=disk.f_bavail * disk.f_frsize,
        total_bytes=disk.f_blocks * disk.f_frsize,
    )


class _Look:
    """One scan under way."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.folders: dict[Path, Identity] = {}
        self.marked: list[FoundSnapshot] = []
        self.unmarked: dict[Path, Unfinished] = {}
        self.doubtful: dict[Path, str] = {}
        self.closed: dict[Path, Unfinished] = {}
        self.closed_folders: list[Path] = []
        self.misnamed: list[Path] = []
        self.files: list[FoundFile] = []

    def folder(self, folder: Path, run: str | None) -> None:
        """Look into the root (``run`` None) or a run's folder."""
        for entry in self._entries(folder):
            path = folder / entry.name
            if match := self._layout.heads[0].fullmatch(entry.name):
                self._head(path, match, 0, run)
            elif self._file(entry, path, run) or run is not None:
                continue
            elif _is_dir(entry):
                # what stands in for a marker is elsewhere, too: a Trainer leaves its last state
                if self._layout.completeness.has_manifest and _is_file(path / self._layout.marker):
                    self.misnamed.append(path)
                if not RUN_NAME.fullmatch(entry.name) or entry.name == _LOST_AND_FOUND:
                    continue
                with self._closed_told(path):
                    self.folder(path, entry.name)

    @contextmanager
    def _closed_told(self, folder: Path) -> Iterator[None]:
        """Note a folder that evald may not look into; pass by what has vanished, or is a file."""
        try:
            yield
        except PermissionError:
            self.closed_folders.append(folder)
        except OSError:
            return

    def _entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        status = folder.stat()
        # (with the dot, one that may be listed but not entered is refused, too)
        with os.scandir(f"{folder}/.") as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        self.folders[folder] = (status.st_dev, status.st_ino)
        yield from visible

    def _head(self, path: Path, match: re.Match[str], level: int, run: str | None) -> None:
        """Go on below a component that fits, down to the one with the step."""
        if level + 1 == len(self._layout.heads):
            text = match["step"]
            tail = [part.replace(_STEP, text) for part in self._layout.tail]
            if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for some links)
                self._snapshot(path.joinpath(*tail), int(text), run)
            return
        with self._closed_told(path):
            for entry in self._entries(path):
                if deeper := self._layout.heads[level + 1].fullmatch(entry.name):
                    self._head(path / entry.name, deeper, level + 1, run)

    def _snapshot(self, directory: Path, step: int, run: str | None) -> None:
        try:
            proof = self._layout.completeness.look(directory, step)
            own = directory.stat()
        except PermissionError:
            self.closed[directory] = Unfinished(step, run)
            return
        except OSError:
            self.unmarked[directory] = Unfinished(step, run)
            return
        if proof is None or isinstance(proof, Doubt):
            self.unmarked[directory] = Unfinished(step, run)
            if proof is not None:
                self.doubtful[directory] = proof.sentence
            return
        self.marked.append(
            FoundSnapshot(
                directory=directory,
                step=step,
                folder_run=run,
                identity=(own.st_dev, own.st_ino, *proof.identity),
                marker_mtime_ns=proof.mtime_ns,
            )
        )

    def _file(self, entry: os.DirEntry[str], path: Path, run: str | None) -> bool:
        """Take in a word of the trainer; False when the name is none."""
        kind: Literal["skip", "request", "run_end"]
        step = None
        if match := self._layout.skip.fullmatch(entry.name):
            kind, step = "skip", int(match["step"])
        elif entry.name.endswith(".request"):
            kind = "request"
        elif entry.name == "run.end":
            kind = "run_end"
        else:
            return False
        try:
            status = entry.stat()
        except OSError:
            return True  # consumed meanwhile
        if stat.S_ISREG(status.st_mode):
            self.files.append(
                FoundFile(
                    kind=kind,
                    path=path,
                    step=step,
                    folder_run=run,
                    identity=file_identity(status),
                    mtime_ns=status.st_mtime_ns,
                )
            )
        return True


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _compiled(part: str) -> re.Pattern[str]:
    """Make a component of the pattern a regular expression; ``{step}`` is one number."""
    before, *after = part.split(_STEP)
    expression = re.escape(before)
    for number, text in enumerate(after):
        expression += (r"(?P<step>[0-9]{1,15})" if number == 0 else r"(?P=step)") + re.escape(text)
    return re.compile(expression)
