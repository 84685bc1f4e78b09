"""Whether evald has ended the point of a step that is to be published once more."""

from __future__ import annotations

import json
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from evald.trainer.publish.faults import StillEvaluating
from evald.trainer.publish.names import read_small

_POLL_S = 0.1
#: a daemon whose beat counter stands still this long is taken for dead: nobody waits for it.
_DEAD_AFTER_S = 10.0


def wait_until_ended(root: Path, runs: Container[str] | None, step: int, timeout_s: float) -> None:
    """Wait while a living evald has a point of this step queued or running."""
    deadline = time.monotonic() + timeout_s
    last_beat, moved = None, time.monotonic()
    while (beat := _beat_if_held(root, runs, step)) is not None:
        now = time.monotonic()
        if beat != last_beat:
            last_beat, moved = beat, now
        elif now - moved > _DEAD_AFTER_S:
            return
        if now > deadline:
            raise StillEvaluating(
                f"cannot publish step {step} again: evald has not ended its point within "
                f"{timeout_s:g} s; publish later, or report it with skip(..., 'busy')"
            )
        time.sleep(_POLL_S)


def _beat_if_held(root: Path, runs: Container[str] | None, step: int) -> int | None:
    """Return the daemon's beat counter if its status lists this step, else None.

    Of another run, too: only where the root is a run's folder, the points of other folders are
    told apart by ``runs``; None: they cannot be.
    """
    for folder in (root, root.parent):  # the staging root, or a run's folder in it
        try:
            status = json.loads(read_small(folder / ".evald" / "status.json"))
            for point in status["queued"] + status["running"]:
                if point["step"] == step and (
                    folder == root or runs is None or point["run"] in runs
                ):
                    return int(status["beat"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # no daemon has ever served here, or one that speaks another schema
            continue
    return None


def runs_of(root: Path, marker: Path, run: str | None) -> set[str] | None:
    """Return the runs whose point a published step of a run's folder may be; None: any."""
    if run is None:
        return None
    runs = {run, root.name}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        runs.add(str(json.loads(read_small(marker))["run"]))
    return runs
