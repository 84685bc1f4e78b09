"""Is there room for a snapshot? Asked before a byte of it is gathered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evald.status.view import StagingView
from evald.trainer.publish.budget import no_room, over_budget
from evald.trainer.publish.reservation import Reservations

#: the file system's own, which the estimate does not know.
_MARGIN_BYTES = 32 << 20
#: names and shapes of many small tensors, in headers and index.
_HEADERS = 1.01
#: config, index and manifest of a small model.
_OWN_BYTES = 64 << 10
#: of the base model's directory: a snapshot has its own, or none.
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})


def snapshot_bytes(weights: Any, base_dir: Path | None) -> int | None:
    """Estimate the size of a snapshot of ``weights``, rather too large; None when nothing tells.

    An iterator cannot be asked: then it is as large as the base model's weights.
    """
    known, beside = _weights_bytes(weights), 0
    if base_dir is not None:
        try:
            sizes = [(path.suffix, path.stat().st_size) for path in _files(base_dir)]
        except OSError:
            sizes = []
        known = known or sum(size for suffix, size in sizes if suffix == ".safetensors")
        beside = sum(size for suffix, size in sizes if suffix not in _WEIGHTS)
    return int(known * _HEADERS) + _OWN_BYTES + beside if known else None


class Room:
    """Room for the snapshots of one process, in ``root`` and where the daemon sees them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reservations: Reservations | None = None

    def take(
        self,
        step: int,
        need_bytes: int,
        *,
        exporting_bytes: int,
        far: StagingView | None,
        alive: bool,
        on_its_way_bytes: int,
        final: bool,
    ) -> str | None:
        """Say in one sentence why a snapshot does not fit; None: it does, and has its room.

        ``exporting_bytes``: of exports that are still being written into ``root``. ``far``: the
        staging root as the daemon saw it last; ``alive``: that is true now; ``on_its_way_bytes``:
        of snapshots that it does not count yet. A ``final`` snapshot may go over the daemon's
        budget, but not over the file system's.
        """
        least = far.min_free_bytes if far is not None else 0
        free = _free_bytes(self._root)
        if free is not None and free - exporting_bytes < need_bytes + max(_MARGIN_BYTES, least):
            return no_room(need_bytes, self._root, free)
        if far is None:
            return None
        if alive and far.free_bytes - on_its_way_bytes < need_bytes + least:
            return no_room(need_bytes, f"the staging root {far.root}", far.free_bytes)
        try:
            return self._here(far.root).take(
                step,
                need_bytes,
                lambda used: over_budget(need_bytes, used, far.max_bytes, final=final),
            )
        except TimeoutError as error:
            return f"cannot reserve room for the snapshot: {error}"
        except OSError:
            pass  # elsewhere, or another user's: the daemon's own numbers must do
        used = far.used_bytes + on_its_way_bytes
        return over_budget(need_bytes, used, far.max_bytes, final=final) if alive else None

    def give_back(self, step: int) -> None:
        """End what was taken for a step: it is published, or will not be."""
        if self._reservations is not None:
            self._reservations.give_back(step)

    def _here(self, far_root: str) -> Reservations:
        """Return the promises of the staging root, which ``root`` is, or a run's folder in it.

        Raises OSError when it is on another host.
        """
        if self._reservations is None:
            (Path(far_root) / ".evald" / "status.json").stat()  # a spool has none
            places = [path for path in (self._root, self._root.parent) if path.exists()]
            if not any(path.samefile(far_root) for path in places):
                raise FileNotFoundError(f"{self._root} does not lie in {far_root}")
            self._reservations = Reservations(Path(far_root), self._root)
        return self._reservations


def _files(base_dir: Path) -> Iterator[Path]:
    """Yield what may come along from the base model's directory."""
    for path in base_dir.iterdir():
        if path.is_file():
            yield path
        elif path.name == "additional_chat_templates":
            yield from (inner for inner in path.iterdir() if inner.is_file())


def _weights_bytes(weights: Any) -> int | None:
    if "torch" not in sys.modules:
        return None  # they are not torch's: the job brings an exporter of its own
    from evald.trainer.export.tensors import weights_bytes  # noqa: PLC0415 - needs torch

    return weights_bytes(weights)


def _free_bytes(root: Path) -> int | None:
    """Return what the user may write on the file system that ``root`` lies, or will lie, on."""
    for folder in (root, *root.parents):
        try:
            disk = os.statvfs(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize
    return None
