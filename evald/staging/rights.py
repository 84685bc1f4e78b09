"""May evald read and delete here? Asked early, and answered in words."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from evald.staging.files import MAX_DEPTH, SnapshotFile

_FOLDER = os.R_OK | os.W_OK | os.X_OK
_ACL = "system.posix_acl_access"


def unreadable(file: SnapshotFile, error: OSError) -> str:
    """Say why a file cannot be read and what to do about it."""
    if not isinstance(error, PermissionError):
        return f"cannot read {file.name}: {error.strerror or error}"
    mode = stat.S_IMODE(file.mode)
    return (
        f"cannot read {file.name}: its mode is {mode:04o} and its owner {user(file.uid)}, and "
        f"evald runs as {user(os.geteuid())}; the trainer must export with mode 0644 (chmod 0644)"
    )


def closed_folder(folder: Path) -> str:
    """Say why a folder cannot be listed and what to do about it; raises FileNotFoundError."""
    status = folder.stat()
    return (
        f"cannot look into {folder}: its mode is {stat.S_IMODE(status.st_mode):04o} and its owner "
        f"{user(status.st_uid)}, and evald runs as {user(os.geteuid())}; the trainer must export "
        "with mode 0755 (chmod 0755)"
    )


def is_readable(file: SnapshotFile) -> bool:
    """Tell whether evald's user may read the file."""
    return os.access(file.path, os.R_OK, effective_ids=True)


def deletable(directory: Path, *, with_entry: bool = False) -> str | None:
    """Return None when evald may delete all that is in ``directory``, else one sentence.

    ``with_entry``: the directory's own entry in its parent, too (a snapshot in a staging root).
    Hidden entries of a staging root are the trainer's unfinished work and not looked at.
    """
    try:
        if with_entry:
            fault = _folder_fault(directory.parent) or _sticky_fault(directory.parent, directory)
            if fault is not None:
                return f"cannot delete {directory}: {fault}"
        for folder in _folders(directory, hidden=with_entry):
            fault = _folder_fault(folder) or _sticky_entries_fault(folder)
            if fault is not None:
                return f"cannot delete what is in {directory}: {fault}"
    except FileNotFoundError:
        return None  # it is gone already
    except OSError as error:
        return f"cannot look at all that is in {directory}: {error.strerror}; delete it by hand"
    return None


def user(uid: int) -> str:
    """Return "name (uid N)"."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _folders(folder: Path, *, hidden: bool, depth: int = 0) -> Iterator[Path]:
    """Yield the folder and every folder below it that can be listed; links are not followed."""
    yield folder
    if depth > MAX_DEPTH:
        return  # no valid snapshot
    try:
        with os.scandir(folder) as found:
            entries = [e for e in found if e.is_dir(follow_symlinks=False)]
    except PermissionError:
        return  # its fault has just been told
    for entry in entries:
        if hidden or not entry.name.startswith("."):
            yield from _folders(folder / entry.name, hidden=hidden, depth=depth + 1)


def _folder_fault(folder: Path) -> str | None:
    if os.access(folder, _FOLDER, effective_ids=True):
        return None
    status = folder.stat()
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"the file system of {folder} is mounted read-only; set staging.owned = false"
    found = (
        f"{folder} has mode {stat.S_IMODE(status.st_mode):04o} and owner {user(status.st_uid)}, "
        f"and evald runs as {user(os.geteuid())}"
    )
    if _is_masked(folder, status.st_mode):
        return (
            f"{found}; this mode takes away what the folder's ACL gives: chmod g+w it, also after "
            "each copy that keeps modes (cp -r, rsync -a)"
        )
    return (
        f"{found}; run both as one user, or give evald's user a default ACL on the staging root "
        f"(setfacl -R -d -m u:{os.geteuid()}:rwX)"
    )


def _is_masked(folder: Path, mode: int) -> bool:
    """With an ACL, the group's bits of the mode are the most that it gives to anybody named."""
    try:
        has_acl = _ACL in os.listxattr(folder)
    except OSError:
        return False
    return has_acl and mode & stat.S_IRWXG != stat.S_IRWXG


def _sticky_entries_fault(folder: Path) -> str | None:
    if not folder.stat().st_mode & stat.S_ISVTX:
        return None
    with os.scandir(folder) as found:
        for entry in found:
            fault = _sticky_fault(folder, folder / entry.name)
            if fault is not None:
                return fault
    return None


def _sticky_fault(folder: Path, entry: Path) -> str | None:
    """In a sticky folder only the owner of an entry, or of the folder, may remove it."""
    status, me = folder.stat(), os.geteuid()
    if not status.st_mode & stat.S_ISVTX or me in {0, status.st_uid}:
        return None
    owner = entry.lstat().st_uid
    if owner == me:
        return None
    return (
        f"{folder} is sticky (mode {stat.S_IMODE(status.st_mode):04o}) and {entry.name} belongs to "
        f"{user(owner)}, while evald runs as {user(me)}; chmod -t {folder}, or run both as one user"
    )
