"""The marker's content: nothing, or a manifest as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from evald.errors import InvalidSnapshot
from evald.staging.files import open_file

#: a manifest of 100,000 files is far below this; anything above is no manifest.
MAX_BYTES = 64 << 20
#: run ids become path components and parts of metric names (the same rule as the config's).
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of the snapshot: size in bytes, and the hex xxh3-64 of its content."""

    size: Annotated[int, Meta(ge=0)] | None = None
    xxh3: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{16}\Z")] | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer may say about a snapshot; every field can be missing, others are ignored."""

    step: int | None = None
    run: str | None = None
    #: relative name -> size and hash; files that it does not name are not checked.
    files: dict[str, ManifestFile] = {}
    export_s: float | None = None
    stall_s: float | None = None
    final: bool = False

    @property
    def is_hashed(self) -> bool:
        """Whether the trainer asked for its hashes to be checked."""
        return any(file.xxh3 is not None for file in self.files.values())


_decoder = msgspec.json.Decoder(Manifest)


def parse_manifest(content: bytes, *, name: str, step: int | None) -> Manifest:
    """Read a marker's content; ``step`` is what the directory's name says (None: not compared).

    Raises InvalidSnapshot with the cause, which names the marker ``name``.
    """
    if not content.strip():
        return Manifest()
    try:
        manifest = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSnapshot(
            f"marker {name} is neither empty nor a manifest in JSON ({_short(str(error))}); write "
            "it empty, or with the fields step, run, files, export_s, stall_s and final"
        ) from error
    if manifest.run is not None and not RUN_NAME.fullmatch(manifest.run):
        raise InvalidSnapshot(
            f"marker {name} names run {_short(manifest.run)!r}, which cannot be a part of file and "
            "metric names; use letters, digits and . _ @ + -, at most 128"
        )
    if None not in {manifest.step, step} and manifest.step != step:
        raise InvalidSnapshot(
            f"marker {name} is the manifest of step {manifest.step}, but the directory's name says "
            f"{step}; one of the two is of another export"
        )
    return manifest


def read_manifest(marker: Path, *, step: int | None) -> Manifest:
    """Read the marker file; raises InvalidSnapshot as ``parse_manifest`` does, and OSError."""
    with open_file(marker) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InvalidSnapshot(f"marker {marker.name} is larger than {MAX_BYTES} bytes")
    return parse_manifest(content, name=marker.name, step=step)


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."  # noqa: PLR2004 (one readable line)
