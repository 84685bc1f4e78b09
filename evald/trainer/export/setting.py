"""What all snapshots of one exporter have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from evald.trainer.export.base_files import BaseModel


class Options(NamedTuple):
    """What is the same for every snapshot of an exporter."""

    root: Path
    run: str | None
    pattern: str
    marker: str
    max_shard_bytes: int
    hashes: bool
    #: the torch type that weights get; None: they stay as they are.
    dtype: Any
    allow_absent: tuple[str, ...]
    onload: Callable[[], object] | None
    offload: Callable[[], object] | None
    busy_timeout_s: float


class Setting(NamedTuple):
    """What the ranks have found out together before the first snapshot."""

    base: BaseModel
    #: the ranks that write; rank 0 is the first.
    writers: tuple[int, ...]
