"""What is to be pushed: the files of one finished directory, its marker, and who carries which."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from evald.trainer.contract import PushError

#: folders within folders; a loop of links ends here, too.
_MAX_DEPTH = 32
_CHUNK_BYTES = 8 << 20
#: less than that is not worth a connection of its own.
MIN_SHARE_BYTES = 32 << 20


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
    """What a push needs to know of a manifest; an empty marker says nothing."""

    step: int | None = None
    run: str | None = None
    files: dict[str, ManifestEntry] = {}


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """A finished directory on its way."""

    source: Path
    #: of the directory below the far root, with "/".
    name: str
    files: list[SourceFile]
    #: the marker's name in the directory, and its content.
    marker: str
    content: bytes
    said: MarkerContent

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the marker."""
        return sum(file.size_bytes for file in self.files)

    @property
    def step(self) -> int | None:
        """The step: the manifest's, else the last number in the name."""
        numbers = re.findall(r"[0-9]{1,15}", self.name)
        if self.said.step is not None:
            return self.said.step
        return int(numbers[-1]) if numbers else None

    @property
    def temporary(self) -> str:
        """A hidden name beside the others: the same for the same bytes, so that a push resumes."""
        state = xxhash.xxh3_64()
        for file in self.files:
            entry = self.said.files.get(file.name)
            # without a hash the time of writing tells one export from the next
            bytes_of = file.mtime_ns if entry is None or entry.xxh3 is None else entry.xxh3
            line = f"{file.name}\0{file.size_bytes}\0{bytes_of}\n"
            state.update(line.encode(errors="surrogateescape"))
        return f"{temporary_prefix(self.name)}{state.hexdigest()}"


def temporary_prefix(name: str) -> str:
    """Return how the hidden names for a directory begin; 16 hex digits follow."""
    return f".push-{name.replace('/', '--')}."


def is_attempt(hidden: str, name: str) -> bool:
    """Tell whether ``hidden`` is the hidden name of a push of ``name``."""
    rest = hidden.removeprefix(temporary_prefix(name))
    return rest != hidden and re.fullmatch(r"[0-9a-f]{16}(\.old)?", rest) is not None


def check_name(name: str) -> str:
    """Return a name below the far root, tidied; raises ValueError for what evald would not see."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or any(part[0] in ".-" for part in path.parts):
        raise ValueError(
            f"cannot push as {name!r}: give a name below the root, such as step_40 or run/step_40, "
            "of which no part begins with . or -"
        )
    return str(path)


def pack(source: Path, name: str, *, marker: str, content: bytes | None = None) -> Parcel:
    """List what is in ``source``; ``content``: the marker's, where there is no marker yet.

    Raises PushError when the directory is empty, not finished or cannot be read.
    """
    try:
        if content is None:
            content = (source / marker).read_bytes()
        files = sorted(_walk(source, "", marker), key=lambda file: file.name)
    except FileNotFoundError as error:
        if error.filename == str(source / marker):
            raise PushError(
                f"cannot push {source}: it has no marker {marker}, so it is not finished"
            ) from error
        raise PushError(f"cannot push {source}: {error.filename} is not there") from error
    except OSError as error:
        raise PushError(f"cannot push {source}: {error.filename}: {error.strerror}") from error
    if not files:
        raise PushError(f"cannot push {source}: there is no file in it")
    said = _read_marker(content)
    return Parcel(source=source, name=name, files=files, marker=marker, content=content, said=said)


def make_manifest(source: Path, *, marker: str) -> bytes:
    """Return a marker's content for a directory that has none: every file with size and hash.

    Reads every file; raises PushError.
    """
    parcel = pack(source, source.name, marker=marker, content=b"")
    try:
        files = {
            file.name: {"size": file.size_bytes, "xxh3": hash_file(file.path)}
            for file in parcel.files
        }
        return msgspec.json.encode({"schema": 1, "files": files}) + b"\n"
    except OSError as error:
        raise PushError(f"cannot push {source}: {error.filename}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise PushError(
            f"cannot push {source}: a file's name is not UTF-8 ({error.object!a}); rename it"
        ) from error


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


def share_out(files: Sequence[SourceFile], streams: int) -> list[list[SourceFile]]:
    """Split files among at most ``streams`` carriers so that each has about as many bytes.

    The largest come first: each goes to whoever has the least by then.
    """
    total_bytes = sum(file.size_bytes for file in files)
    count = min(streams, len(files), max(total_bytes // MIN_SHARE_BYTES, 1))
    shares: list[list[SourceFile]] = [[] for _ in range(count)]
    loads = [0] * len(shares)
    for file in sorted(files, key=lambda file: (-file.size_bytes, file.name)):
        least = loads.index(min(loads))
        shares[least].append(file)
        loads[least] += file.size_bytes + 1  # empty files count, too
    return shares


def by_name(files: Sequence[SourceFile], names: set[str]) -> list[SourceFile]:
    """Return the files that ``names`` has; all of them when it has another name, too."""
    known = {file.name for file in files}
    return [file for file in files if file.name in names or not known.issuperset(names)]


def _walk(folder: Path, prefix: str, marker: str) -> Iterator[SourceFile]:
    if prefix.count("/") > _MAX_DEPTH:
        raise PushError(f"cannot push {folder}: more than {_MAX_DEPTH} folders lie in each other")
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        name = prefix + entry.name
        path = folder / entry.name
        if name == marker or entry.name.startswith(".nfs"):
            continue  # those an NFS client makes and drops by itself
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(path, name + "/", marker)
        elif stat.S_ISREG(status.st_mode):
            yield SourceFile(name, path, status.st_size, status.st_mtime_ns)
        else:
            raise PushError(f"cannot push {path}: it is neither a file nor a folder; remove it")


def _read_marker(content: bytes) -> MarkerContent:
    """Read a manifest as far as it can be understood: judging it is evald's business."""
    try:
        return msgspec.json.decode(content, type=MarkerContent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return MarkerContent()
