"""What a point is compared with: the measured point before it, and the baseline of its run."""

from __future__ import annotations

from pathlib import Path

from evald.evals.stats.set_metrics import Earlier
from evald.point import Kind, PointKey
from evald.results.index import PointIndex
from evald.results.samples import sample_file


class EarlierPoints:
    """Finds journals by the ledger's index; call it to get those of one set."""

    def __init__(self, index: PointIndex, results_dir: Path) -> None:
        self._index = index
        self._results_dir = results_dir

    def __call__(self, key: PointKey, set_name: str) -> list[Earlier]:
        """Name the journals of ``set_name`` that ``key`` is compared with; a baseline with none."""
        if key.kind is Kind.BASELINE:
            return []
        points = {
            "prev": self._index.measured(key.run, Kind.STEP, below=key.step),
            "baseline": self._index.measured(key.run, Kind.BASELINE),
        }
        return [
            Earlier(name, str(sample_file(self._results_dir, state.key, set_name)), state.digest)
            for name, state in points.items()
            if state is not None and state.digest is not None
        ]
