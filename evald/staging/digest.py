"""What a snapshot is: a cheap fingerprint of the directory, and the digest of its content."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from evald.errors import EvaldError, InvalidSnapshot
from evald.staging.files import SnapshotFile, is_training_state, list_files, open_file
from evald.staging.manifest import ManifestFile
from evald.staging.rights import unreadable

_CHUNK_BYTES = 8 << 20
#: one thread reads tmpfs at some GB/s: a few are enough to be limited by memory or disk.
_THREADS = 4
#: below this, starting threads costs more than they save.
_SMALL_BYTES = 32 << 20


class HashingStopped(EvaldError):
    """The daemon stops: nobody waits for this digest any more."""


def fingerprint(directory: Path, marker: str) -> tuple[str, int]:
    """Return (hex fingerprint, total bytes) of the files of ``directory``, marker included.

    It changes when a file is added, removed, replaced or written; it does not read content. What a
    trainer keeps to resume from counts for the bytes only. A directory without the marker has a
    fingerprint, too. Raises FileNotFoundError when the directory is not there, SnapshotGone when it
    cannot be listed.
    """
    state, total_bytes = xxhash.xxh3_128(), 0
    with suppress(OSError):  # it is no link; what else is wrong the listing tells
        state.update(f"link {directory.readlink()}\n".encode(errors="surrogateescape"))
    for file in _with_marker(list_files(directory), directory, marker):
        total_bytes += file.size_bytes
        if file.name != marker and is_training_state(file.name):
            continue
        line = f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}\0{file.inode}\0{file.link}\n"
        state.update(line.encode(errors="surrogateescape"))
    return state.hexdigest(), total_bytes


def content_digest(
    directory: Path,
    marker: str,
    *,
    expected: Mapping[str, ManifestFile] | None = None,
    stop: threading.Event | None = None,
) -> str:
    """Return the hex xxh3-128 over the sorted lines (name, size, xxh3-64) of all files.

    The marker is not part of it, nor is what a trainer keeps to resume from, so equal weights
    exported twice have equal digests. ``expected``: hashes of a manifest to check on the way.
    Setting ``stop`` ends the work with HashingStopped. Raises FileNotFoundError when the directory
    vanishes, InvalidSnapshot for a file that cannot be read or has another hash.
    """
    expected = {name: file for name, file in (expected or {}).items() if name != marker}
    files = [
        file
        for file in list_files(directory)
        if file.name != marker and (file.name in expected or not is_training_state(file.name))
    ]
    hash_one = partial(_file_hash, stop=stop or threading.Event())
    if sum(file.size_bytes for file in files) <= _SMALL_BYTES:
        hashes = {file.name: hash_one(file) for file in files}
    else:
        largest_first = sorted(files, key=lambda file: -file.size_bytes)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="evald-hash") as pool:
            found = pool.map(hash_one, largest_first)
            hashes = {file.name: value for file, value in zip(largest_first, found, strict=True)}
    contents = {name: content for name, (_, content) in hashes.items()}
    _check_hashes(contents, expected)
    return digest_of(hashes)


def digest_of(hashes: Mapping[str, tuple[int, str]]) -> str:
    """Return the digest of files by name: their sizes, and their hex xxh3-64."""
    state = xxhash.xxh3_128()
    for name, (size_bytes, content) in sorted(hashes.items()):
        if is_training_state(name):
            continue
        state.update(f"{name}\0{size_bytes}\0{content}\n".encode(errors="surrogateescape"))
    return state.hexdigest()


def _with_marker(files: list[SnapshotFile], directory: Path, marker: str) -> list[SnapshotFile]:
    """Add a marker that lies beside the directory (a name like ``../done``)."""
    if any(file.name == marker for file in files):
        return files
    try:
        status = (directory / marker).stat()
    except OSError:  # there is none, or the directory may not be entered
        return files
    return [
        *files,
        SnapshotFile(
            name=marker,
            path=directory / marker,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            mode=status.st_mode,
            uid=status.st_uid,
        ),
    ]


def _file_hash(file: SnapshotFile, *, stop: threading.Event) -> tuple[int, str]:
    """Return (bytes read, hex xxh3-64); what is no regular file counts by its link's text."""
    state = xxhash.xxh3_64()
    if not file.is_regular:
        state.update((file.link or "").encode(errors="surrogateescape"))
        return 0, state.hexdigest()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(file.size_bytes, 1))))
    size_bytes = 0
    try:
        with open_file(file.path) as stream:
            while count := stream.readinto(buffer):
                if stop.is_set():
                    raise HashingStopped(f"stopped while hashing {file.path}")
                state.update(buffer[:count])
                size_bytes += count
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidSnapshot(unreadable(file, error)) from error
    return size_bytes, state.hexdigest()


def _check_hashes(hashes: Mapping[str, str], expected: Mapping[str, ManifestFile]) -> None:
    for name, wanted in sorted(expected.items()):
        if wanted.xxh3 is None:
            continue
        found = hashes.get(name)
        if found is None:
            raise InvalidSnapshot(f"the manifest names {name}, which is missing")
        if found != wanted.xxh3.lower():
            raise InvalidSnapshot(
                f"{name} has hash {found}, and the manifest says {wanted.xxh3}: its bytes changed "
                "between export and here; copy it again"
            )
