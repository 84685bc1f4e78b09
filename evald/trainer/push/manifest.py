"""What a marker says of a directory's files, and whether that is true before they are sent."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from pathlib import Path

import msgspec

from evald.trainer.contract import PushError
from evald.trainer.publish.content import hash_file


class SourceFile(msgspec.Struct, frozen=True):
    """One file to be pushed; links are followed, so that its bytes arrive and not a link."""

    #: relative to the directory, with "/".
    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


class ManifestEntry(msgspec.Struct, frozen=True):
    """What the manifest says of one file."""

    size: int | None = None
    xxh3: str | None = None


class MarkerContent(msgspec.Struct, frozen=True):
    """What a push needs to know of a manifest; an empty marker says nothing.

    Equal ones make equal bytes the same point.
    """

    step: int | None = None
    run: str | None = None
    final: bool = False
    files: dict[str, ManifestEntry] = {}


def read_marker(content: bytes) -> MarkerContent:
    """Read a manifest as far as it can be understood: judging it is evald's business."""
    try:
        return msgspec.json.decode(content, type=MarkerContent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return MarkerContent()


def write_marker(source: Path, files: Sequence[SourceFile]) -> bytes:
    """Return a marker's content for a directory that has none: every file with size and hash.

    Reads every file; raises PushError.
    """
    try:
        entries = {
            file.name: {"size": file.size_bytes, "xxh3": hash_file(file.path)} for file in files
        }
        return msgspec.json.encode({"schema": 1, "files": entries}) + b"\n"
    except OSError as error:
        raise PushError(f"cannot push {source}: {error.filename}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise PushError(
            f"cannot push {source}: a file's name is not UTF-8 ({error.object!a}); rename it"
        ) from error


def without(content: bytes, names: Container[str]) -> bytes:
    """Return a marker's content that does not speak of some files; what is no manifest stays."""
    try:
        manifest = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        files = msgspec.json.decode(manifest["files"], type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return content
    kept = {name: entry for name, entry in files.items() if name not in names}
    return msgspec.json.encode({**manifest, "files": kept}) + b"\n"


def check_source(
    source: Path, files: Sequence[SourceFile], said: MarkerContent, deadline: float
) -> None:
    """See that the files are what the manifest says; raises PushError.

    ``deadline``: of ``time.monotonic()``, looked at between files.
    """
    found = {file.name: file for file in files}
    for name, entry in said.files.items():
        fault = _fault(found.get(name), entry, deadline)
        if fault is not None:
            raise PushError(
                f"cannot push {source}: its manifest does not fit, {name} {fault}; export the "
                "snapshot once more"
            )


def _fault(file: SourceFile | None, entry: ManifestEntry, deadline: float) -> str | None:
    if file is None:
        return "is missing"
    if entry.size not in {None, file.size_bytes}:
        return f"has {file.size_bytes} bytes instead of {entry.size}"
    if entry.xxh3 is None:
        return None
    if time.monotonic() > deadline:
        raise PushError(f"cannot push {file.path.parent}: not read within the timeout")
    try:
        is_same = hash_file(file.path) == entry.xxh3.lower()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if is_same else "has other bytes"
