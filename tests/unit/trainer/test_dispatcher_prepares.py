"""Host memory for async exports is taken at the first step, not in the first that is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dispatch_rig import FakeExporter, Job


class Preparing(FakeExporter):
    """Notes what it is to prepare for, and refuses what is none."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.prepared: list[Any] = []

    def prepare(self, weights: Any) -> None:
        self.prepared.append(weights)
        if weights is None:
            raise ValueError("cannot export a NoneType")


@pytest.mark.parametrize(
    ("mode", "weights", "prepared"),
    [("async", "w", ["w"]), ("async", None, [None]), ("sync", "w", [])],
)
def test_memory_is_taken_once(tmp_path: Path, mode: str, weights: Any, prepared: list[Any]) -> None:
    job = Job(tmp_path)
    exporter = Preparing(job.root)
    with job.dispatcher(exporter=exporter, interval=3, mode=mode, baseline=False) as dispatcher:
        actions = [dispatcher.maybe_dispatch(step, weights).action for step in (1, 2)]
        assert dispatcher.maybe_dispatch(3, "w3").step == 3
    assert actions == ["not_due", "not_due"]
    assert exporter.prepared == prepared
