"""Moving and deleting below a root, by descriptors: no link on the way is ever followed.

A path can change under one's feet: a folder becomes a link between a look and a deletion. So each
step is taken from an open folder, refuses links, and deletes one name in the folder that it holds.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OWN_FOLDER = _FOLDER | os.O_NOFOLLOW
#: looks like one folder's name, and is no snapshot's.
_LIFTED = "lifted"


class LeadsOut(OSError):
    """A folder on the way is a link, or something else that is no folder."""


@contextmanager
def folder_of(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Open the folder that holds ``path`` below ``root``; yields its descriptor and the last name.

    The root itself may be a link: whoever configured it meant so. Raises LeadsOut, and OSError.
    """
    below = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if not below or ".." in below:
        raise LeadsOut(0, f"{path} does not lie in {root}")
    folder = os.open(root, _FOLDER)
    try:
        at = root
        for part in below[:-1]:
            at /= part
            deeper = _open_own(part, folder, at)
            os.close(folder)
            folder = deeper
        yield folder, below[-1]
    finally:
        os.close(folder)


@contextmanager
def own_folder(root: Path, name: str) -> Iterator[int]:
    """Open ``root/name`` (folders in between, too), made if it is missing; raises LeadsOut."""
    folder, at = os.open(root, _FOLDER), root
    try:
        for part in Path(name).parts:
            at /= part
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            deeper = _open_own(part, folder, at)
            os.close(folder)
            folder = deeper
        yield folder
    finally:
        os.close(folder)


def is_link(name: str, folder: int) -> bool:
    """Tell whether ``name`` in an open folder is a link."""
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def remove(name: str, trash: int) -> None:
    """Delete ``name`` and all below it; ``trash`` is the open folder that it lies in.

    Folders below are lifted into ``trash`` and emptied there, so that any depth takes one
    descriptor, and what cannot be moved (a mount point, another file system) is not entered. Raises
    OSError of the first name that stays; the others are gone.
    """
    waiting, fault = [name], None
    while waiting:
        try:
            _remove_one(waiting.pop(), trash, waiting)
        except FileNotFoundError:
            continue  # somebody else has removed it
        except OSError as error:
            fault = fault or error
    if fault is not None:
        raise fault


def _remove_one(name: str, trash: int, waiting: list[str]) -> None:
    """Delete a name of the trash; folders in it are lifted beside it and put into ``waiting``."""
    if not _is_folder(name, trash):
        os.unlink(name, dir_fd=trash)
        return
    folder = _open_for_removal(name, trash)
    fault = None
    try:
        if os.fstat(folder).st_dev != os.fstat(trash).st_dev:
            raise OSError(errno.EXDEV, "another file system is mounted there", name)
        with os.scandir(folder) as found:
            names = [entry.name for entry in found]
        for inner in names:
            try:
                _take_out(inner, folder, trash, waiting)
            except FileNotFoundError:
                continue
            except OSError as error:
                fault = fault or OSError(error.errno, error.strerror, f"{name}/{inner}")
    finally:
        os.close(folder)
    if fault is not None:
        raise fault
    os.rmdir(name, dir_fd=trash)


def _take_out(inner: str, folder: int, trash: int, waiting: list[str]) -> None:
    """Delete one name of an open folder, or lift it into the trash if it is a full folder."""
    if not _is_folder(inner, folder):
        os.unlink(inner, dir_fd=folder)  # a hard link's other names keep their bytes
        return
    try:
        os.rmdir(inner, dir_fd=folder)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        lifted = f"{_LIFTED}.{secrets.token_hex(8)}"
        try:
            os.rename(inner, lifted, src_dir_fd=folder, dst_dir_fd=trash)
        except PermissionError:  # its ".." changes, for which its own mode must let us write
            _open_up(inner, folder)
            os.rename(inner, lifted, src_dir_fd=folder, dst_dir_fd=trash)
        waiting.append(lifted)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _open_for_removal(name: str, trash: int) -> int:
    """Open a folder to empty it, whatever mode its owner (evald's user) has left it with."""
    mode = os.stat(name, dir_fd=trash, follow_symlinks=False).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        _open_up(name, trash)
    return os.open(name, _OWN_FOLDER, dir_fd=trash)


def _open_up(name: str, folder: int) -> None:
    """Give the owner all rights on a folder; by descriptor: it cannot be a link's target."""
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        with suppress(PermissionError):  # another user's: perhaps the group's rights are enough
            Path(f"/proc/self/fd/{held}").chmod(mode | stat.S_IRWXU)
    finally:
        os.close(held)


def _open_own(part: str, folder: int, at: Path) -> int:
    try:
        return os.open(part, _OWN_FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise LeadsOut(0, f"{at} is a symbolic link, or no folder") from error
        raise
