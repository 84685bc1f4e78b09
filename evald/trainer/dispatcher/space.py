"""Is there room for a snapshot? Asked before a byte of it is gathered."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from evald.status.view import StagingView

#: manifest, index, tokenizer and the file system's own.
_MARGIN_BYTES = 32 << 20


def snapshot_bytes(weights: Any, base_dir: Path | None) -> int | None:
    """Estimate the size of a snapshot of ``weights``; None when nothing tells.

    An iterator cannot be asked: then it is as large as the base model's weights.
    """
    known = _weights_bytes(weights)
    if known is not None or base_dir is None:
        return known
    try:
        return sum(path.stat().st_size for path in base_dir.glob("*.safetensors")) or None
    except OSError:
        return None


def shortage(
    root: Path,
    need_bytes: int,
    *,
    reserved_bytes: int,
    far: StagingView | None,
    on_its_way_bytes: int,
    final: bool,
) -> str | None:
    """Say in one sentence why a snapshot does not fit; None: it does.

    ``reserved_bytes``: of exports that are still being written into ``root``. ``far``: the staging
    root as a living daemon sees it; ``on_its_way_bytes``: of snapshots that it does not count yet.
    A ``final`` snapshot may go over the daemon's budget, but not over the file system's.
    """
    free = _free_bytes(root)
    if free is not None and free - reserved_bytes < need_bytes + _MARGIN_BYTES:
        return (
            f"the snapshot takes about {_size(need_bytes)}, and {root} has {_size(free)} free; "
            "make room there, or lower staging.keep or dispatch.max_in_flight"
        )
    if far is None:
        return None
    if far.free_bytes - on_its_way_bytes < need_bytes:
        return (
            f"the snapshot takes about {_size(need_bytes)}, and the staging root {far.root} has "
            f"{_size(far.free_bytes)} free; make room there, or lower staging.keep or "
            "dispatch.max_in_flight"
        )
    used = far.used_bytes + on_its_way_bytes
    if not final and far.max_bytes is not None and used + need_bytes > far.max_bytes:
        return (
            f"the snapshot takes about {_size(need_bytes)}, and {_size(used)} of "
            f"staging.max_bytes = {far.max_bytes} are used; raise it, or lower staging.keep or "
            "dispatch.max_in_flight"
        )
    return None


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


def _size(number: int) -> str:
    """Show bytes for people."""
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"  # noqa: PLR2004
