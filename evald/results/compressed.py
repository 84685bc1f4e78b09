"""Samples of points that have ended lie compressed: whoever reads them need not care."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from evald.results.modes import Modes

SUFFIX = ".gz"
#: text shrinks to about a third; higher levels cost much and gain little.
_LEVEL = 4
_CHUNK_BYTES = 1 << 20


def places(path: Path) -> tuple[Path, Path]:
    """Return where the samples of the journal ``path`` may lie, in the order to try to open them.

    The journal goes after its copy has come: who looks for them in this order finds them.
    """
    return path, path.with_name(path.name + SUFFIX)


def stored_file(path: Path) -> Path | None:
    """Return where the samples of the journal ``path`` lie now; None: nowhere."""
    for one in places(path):
        if one.exists():
            return one
    return None


def open_samples(path: Path) -> BinaryIO:
    """Open the samples of the journal ``path``, compressed or not; raises OSError."""
    try:
        return path.open("rb")
    except FileNotFoundError:  # (the journal goes after its copy has come)
        return cast("BinaryIO", _Reader(path.with_name(path.name + SUFFIX)))


def unpack(content: bytes) -> bytes:
    """Return what a compressed file holds; raises OSError."""
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise OSError(f"compressed samples are damaged: {error}") from error


def compress(path: Path, modes: Modes, stopped: Callable[[], bool]) -> bool:
    """Put a compressed copy in the place of ``path``, durably; False when it was ``stopped``.

    Blocking; raises OSError, and then ``path`` is as it was.
    """
    fresh = path.with_name(f".{path.name}{SUFFIX}.new")
    try:
        with path.open("rb") as plain, os.fdopen(_create(fresh, modes), "wb") as out:
            with gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as packed:
                while chunk := plain.read(_CHUNK_BYTES):
                    if stopped():
                        return False
                    packed.write(chunk)
            out.flush()
            os.fsync(out.fileno())
            written = os.fstat(plain.fileno())
        # the age of samples is that of the newest one
        os.utime(fresh, ns=(written.st_atime_ns, written.st_mtime_ns))
        fresh.rename(path.with_name(path.name + SUFFIX))
    finally:
        fresh.unlink(missing_ok=True)
    path.unlink()
    return True


def _create(path: Path, modes: Modes) -> int:
    return modes.open(path, os.O_WRONLY | os.O_TRUNC)


class _Reader(gzip.GzipFile):
    """A compressed file whose damage is an OSError, like that of any other."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes of what was compressed."""
        try:
            return super().read(size)
        except (EOFError, zlib.error) as error:
            raise OSError(f"{self.name} is damaged: {error}") from error

    def readline(self, size: int | None = -1) -> bytes:
        """Read a line of what was compressed."""
        try:
            return super().readline(size)
        except (EOFError, zlib.error) as error:
            raise OSError(f"{self.name} is damaged: {error}") from error
