"""What lies in a staging root, or in a spool, from the trainer's side."""

from __future__ import annotations

import glob
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

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
    before, _, after = pattern.partition(_STEP)
    wildcard = glob.escape(before) + "*" + glob.escape(after).replace(glob.escape(_STEP), "*")
    expression = re.escape(before) + r"([0-9]{1,15})" + re.escape(after)
    number = re.compile(expression.replace(re.escape(_STEP), r"\1"))
    found = []
    for directory in root.glob(wildcard):
        match = number.fullmatch(directory.relative_to(root).as_posix())
        if match is None:
            continue
        try:
            status = (directory / marker).stat()
            run = _run((directory / marker).read_bytes())
        except OSError:
            continue  # unfinished, or gone meanwhile
        found.append(Staged(directory, int(match[1]), run, status.st_mtime_ns))
    return sorted(found, key=lambda one: (one.mtime_ns, one.step))


def words(root: Path) -> list[tuple[int, Path]]:
    """Return the words that nobody has read, with their times (ns), oldest first."""
    return sorted(_words(root))


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
