"""What is to be pushed: the files of one finished directory, its marker, and who carries which."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from evald.trainer.contract import PushError
from evald.trainer.push.choice import is_needed
from evald.trainer.push.manifest import (
    MarkerContent,
    SourceFile,
    check_source,
    read_marker,
    without,
    write_marker,
)

#: folders within folders; a loop of links ends here, too.
_MAX_DEPTH = 32
#: less than that is not worth a connection of its own.
MIN_SHARE_BYTES = 32 << 20


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
    #: in the directory, and not to be pushed.
    left_out: list[SourceFile] = []

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


def shared_root(destination: str) -> Path:
    """Return the root that both hosts see; raises ValueError for a home that is none."""
    try:
        return Path(destination).expanduser().absolute()
    except RuntimeError as error:
        user = destination.partition("/")[0]
        raise ValueError(
            f"cannot push to {destination!r}: there is no home of {user} on this machine"
        ) from error


def pack(
    source: Path,
    name: str,
    *,
    marker: str,
    unmarked: bool = False,
    everything: bool = True,
    deadline: float = math.inf,
) -> Parcel:
    """List what is in ``source``, and see that it is what its manifest says.

    ``unmarked``: a directory without a marker gets one, with every file's hash. ``everything``:
    also what no evaluation needs; else that is ``left_out``, and not in the manifest either.
    ``deadline``: of ``time.monotonic()``.

    Raises PushError when the directory is empty, not finished, not as its manifest says, or cannot
    be read.
    """
    try:
        content = _marker_content(source / marker, unmarked=unmarked)
        found = sorted(_walk(source, "", marker), key=lambda file: file.name)
    except FileNotFoundError as error:
        if error.filename == str(source / marker):
            raise PushError(
                f"cannot push {source}: it has no marker {marker}, so it is not finished"
            ) from error
        raise PushError(f"cannot push {source}: {error.filename} is not there") from error
    except OSError as error:
        raise PushError(f"cannot push {source}: {error.filename}: {error.strerror}") from error
    files = [file for file in found if everything or is_needed(file.name)]
    left_out = [file for file in found if not (everything or is_needed(file.name))]
    if not files:
        what = "no file" if not left_out else "no weights, config or tokenizer file"
        all_of_it = "; --all sends what there is" if left_out else ""
        raise PushError(f"cannot push {source}: there is {what} in it{all_of_it}")
    if content is None:
        content = write_marker(source, files)
    else:
        check_source(source, found, read_marker(content), deadline)
        if left_out:
            content = without(content, {file.name for file in left_out})
    return Parcel(
        source=source,
        name=name,
        files=files,
        left_out=left_out,
        marker=marker,
        content=content,
        said=read_marker(content),
    )


def _marker_content(path: Path, *, unmarked: bool) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if unmarked:
            return None
        raise


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
