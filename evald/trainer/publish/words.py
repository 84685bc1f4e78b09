"""What a training job says besides snapshots: small files in the staging root."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from evald.trainer.publish.names import checked_root, flat, name_of, with_run, write_atomically

#: as evald reads it: it becomes a part of metric names.
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")


def skip(
    root: str | os.PathLike[str],
    step: int,
    reason: str,
    detail: str = "",
    *,
    run: str | None = None,
    pattern: str = "step_{step}",
) -> Path:
    """Tell evald that this step gets no snapshot: the point ends ``skipped`` with ``reason``.

    Usual reasons: ``export_failed``, ``no_space``, ``busy``. ``detail`` is one sentence for people.
    Raises ValueError for a reason that cannot be a part of a metric's name.
    """
    if not _REASON.fullmatch(reason):
        raise ValueError(
            f"cannot skip step {step} with reason={reason!r}: it becomes a part of a metric's "
            "name; use small letters, digits and _, the first a letter, at most 64, and say the "
            "rest in detail"
        )
    root = checked_root(root)
    path = root / f"{flat(name_of(pattern, step))}.skip"
    return write_atomically(root, path, with_run(run, reason=reason, detail=detail))


def end_run(root: str | os.PathLike[str], last_step: int, *, run: str | None = None) -> Path:
    """Tell evald that the run is over: it reports the run once every point has ended."""
    root = checked_root(root)
    return write_atomically(root, root / "run.end", with_run(run, last_step=last_step))


def write_request(
    root: str | os.PathLike[str], name: str, content: dict[str, Any], *, run: str | None = None
) -> Path:
    """Ask evald for a point that is no snapshot in the root: ``name.request`` appears at once."""
    root = checked_root(root)
    return write_atomically(root, root / f"{flat(name)}.request", with_run(run, **content))
