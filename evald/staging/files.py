"""The files of a snapshot directory, listed once for fingerprint, digest and validation.

Every name counts, hidden ones too, except ``.nfs*``: those an NFS client makes and drops by itself
while a deleted file is still open. Links to directories are listed and not entered.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import msgspec

from evald.errors import SnapshotGone

#: what trainers keep beside the weights to resume from, by the first component of its name.
_TRAINING_STATE = (
    "optimizer.*",
    "optimizer_[0-9]*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "random_states_*",
    "trainer_state.json",
    "training_args.bin",
    "global_step[0-9]*",
)
#: folders within folders; no checkpoint comes near, and every look at one recurses.
MAX_DEPTH = 32
#: of a folder's path: any name still fits behind it (PATH_MAX is 4096 bytes).
_MAX_PATH_BYTES = 3800


class SnapshotFile(msgspec.Struct, frozen=True):
    """One name below the snapshot directory; sizes and modes are those of a link's target."""

    #: relative to the snapshot directory, with "/".
    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    inode: int
    #: file type and permission bits, as in ``st_mode``.
    mode: int
    uid: int
    #: a symbolic link's text.
    link: str | None = None
    #: a symbolic link to something that is not there.
    dangling: bool = False
    #: a folder that is not listed because its path is too long or has too many folders.
    too_deep: bool = False

    @property
    def is_regular(self) -> bool:
        """Whether its content can be read: no directory link, socket or pipe."""
        return stat.S_ISREG(self.mode) and not self.dangling

    @property
    def is_special(self) -> bool:
        """Whether it is neither file nor folder: opening a pipe can wait for ever."""
        return not self.dangling and not stat.S_ISREG(self.mode) and not stat.S_ISDIR(self.mode)

    @property
    def is_hidden(self) -> bool:
        """Whether loaders pass it over: its own or a folder's name starts with a dot."""
        return any(part.startswith(".") for part in PurePosixPath(self.name).parts)

    @property
    def is_closed_folder(self) -> bool:
        """Whether it stands for a folder that evald may not list."""
        return stat.S_ISDIR(self.mode) and self.link is None and not self.too_deep


def list_files(directory: Path) -> list[SnapshotFile]:
    """List everything below ``directory``, sorted by name.

    A folder that may not be read, or lies too deep, stands for itself. Raises FileNotFoundError
    when the directory, or something in it, vanishes meanwhile, and SnapshotGone when the file
    system fails.
    """
    try:
        _require_folder(directory)
        return sorted(_walk(directory, ""), key=lambda file: file.name)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SnapshotGone(f"cannot list {directory}: {error.strerror or error}") from error


def is_training_state(name: str) -> bool:
    """Tell whether a name below the snapshot is no part of the model.

    No engine loads it, it is larger than the weights, and ranks other than the first may write
    theirs when the snapshot is finished already: so it counts neither for fingerprint nor digest.
    """
    first = name.partition("/")[0]
    return any(fnmatchcase(first, pattern) for pattern in _TRAINING_STATE)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for reading; raises OSError, also for a pipe or a device in a file's place."""
    # not blocking: a pipe without writer must not hold the caller
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _require_folder(directory: Path) -> None:
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(directory))


def _walk(folder: Path, prefix: str) -> Iterator[SnapshotFile]:
    if prefix.count("/") > MAX_DEPTH or len(os.fsencode(folder)) > _MAX_PATH_BYTES:
        yield msgspec.structs.replace(_describe(folder, prefix.rstrip("/")), too_deep=True)
        return
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        yield _describe(folder, prefix.rstrip("/") or ".")
        return
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.name.startswith(".nfs"):
            continue
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, name + "/")
        else:
            yield _describe(folder / entry.name, name)


def _describe(path: Path, name: str) -> SnapshotFile:
    status, link, dangling = path.lstat(), None, False
    if stat.S_ISLNK(status.st_mode):
        link = str(path.readlink())
        try:
            status = path.stat()
        except OSError:  # nothing there, a loop, or a folder that may not be entered
            dangling = True
    return SnapshotFile(
        name=name,
        path=path,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        mode=status.st_mode,
        uid=status.st_uid,
        link=link,
        dangling=dangling,
    )
