"""The files of a snapshot: what the manifest says of them, and who may read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 20


def make_parents(target: Path, root: Path) -> None:
    """Make the directories between the root and ``target``, as open as ``target`` itself."""
    bits = _folder_bits(root)
    for parent in reversed(target.relative_to(root).parents[:-1]):
        folder = root / parent
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | bits)


def _walk(directory: Path) -> Iterator[Path]:
    """Yield everything below ``directory``; links are not followed."""
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            yield Path(folder, name)


def list_files(
    directory: Path, *, hashes: bool, known: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry for every file; ``known``: entries that need no hashing."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(_walk(directory)):
        if not path.is_file():
            continue
        name = path.relative_to(directory).as_posix()
        entry: dict[str, Any] = {"size": path.stat().st_size}
        if name in known:
            entry = known[name]
        elif hashes:
            entry["xxh3"] = hash_file(path)
        files[name] = entry
    return files


def hash_file(path: Path, *, from_disk: bool = False) -> str:
    """Return the 16 hex digits of the content's xxh3-64; raises OSError.

    ``from_disk``: what lies in the page cache is not good enough, as far as the system lets us.
    """
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def open_up(directory: Path, root: Path) -> None:
    """Let another user read every file and, where the root's group may write, delete them.

    Bits are only added: under a default ACL the group bits are its mask, and taking them away
    would lock out exactly the user whom the ACL names.
    """
    folder_bits = _folder_bits(root)
    for path in (directory, *_walk(directory)):
        if not path.is_symlink():
            bits = folder_bits if path.is_dir() else 0o644
            path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)


def _folder_bits(root: Path) -> int:
    return 0o755 | (root.stat().st_mode & stat.S_IWGRP)
