"""What lies in a staging root, or in a spool, from the trainer's side."""

from __future__ import annotations

import contextlib
import glob
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evald.staging.digest import digest_of
from evald.staging.manifest import Manifest
from evald.trainer.publish.names import flat, read_small, step_expression

_STEP = "{step}"


class Staged(msgspec.Struct, frozen=True):
    """A finished snapshot."""

    path: Path
    step: int
    #: its manifest's; None: it names none.
    run: str | None
    mtime_ns: int


def staged(root: Path, pattern: str, marker: str) -> list[Staged]:
    """Return the finished snapshots in ``root``, oldest marker first."""
    wildcard = glob.escape(pattern).replace(glob.escape(_STEP), "*")
    number = re.compile(step_expression(pattern))
    found = []
    for directory in root.glob(wildcard):
        match = number.fullmatch(directory.relative_to(root).as_posix())
        if match is None:
            continue
        try:
            status = (directory / marker).stat()
            run = _run(read_small(directory / marker))
        except OSError:
            continue  # unfinished, or gone meanwhile
        found.append(Staged(directory, int(match["step"]), run, status.st_mtime_ns))
    return sorted(found, key=lambda one: (one.mtime_ns, one.step))


def published_digest(marker: Path) -> str | None:
    """Return the digest of a published snapshot, by its manifest; None: that does not tell."""
    try:
        files = msgspec.json.decode(marker.read_bytes(), type=Manifest).files
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    hashes = {
        name: (file.size, file.xxh3)
        for name, file in files.items()
        if file.size is not None and file.xxh3 is not None
    }
    return digest_of(hashes) if hashes and len(hashes) == len(files) else None


def words(root: Path) -> list[tuple[int, Path]]:
    """Return the words that nobody has read, with their times (ns), oldest first."""
    return sorted(_words(root))


def skipped(root: Path, pattern: str) -> list[tuple[int, str | None]]:
    """Return the step and the run (None: it names none) of each skip that nobody has read."""
    expression = re.compile(step_expression(flat(pattern)) + r"\.skip")
    found = []
    for path in root.glob("*.skip"):
        if (match := expression.fullmatch(path.name)) is not None:
            with contextlib.suppress(OSError):  # gone meanwhile
                found.append((int(match["step"]), _run(read_small(path))))
    return found


def _words(root: Path) -> Iterator[tuple[int, Path]]:
    for wildcard in ("*.skip", "*.request", "run.end"):
        for path in root.glob(wildcard):
            if path.name.startswith("."):
                continue
            try:
                yield path.stat().st_mtime_ns, path
            except OSError:
                continue


def remove(path: Path, root: Path, marker: str) -> None:
    """Remove a word, or a snapshot of which no half must ever be seen; raises OSError."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    (path / marker).unlink(missing_ok=True)
    hidden = root / f".tmp-gone.{secrets.token_hex(4)}"
    path.rename(hidden)
    shutil.rmtree(hidden)
    for parent in path.parents:
        if parent == root or any(parent.iterdir()):
            return
        parent.rmdir()


def _run(content: bytes) -> str | None:
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        return None  # an empty marker, or another trainer's
    run = manifest.get("run") if isinstance(manifest, dict) else None
    return run if isinstance(run, str) else None
