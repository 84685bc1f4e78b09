"""The metrics of a point's sets, computed in a worker process from what lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from evald.errors import EvalSkip
from evald.evals.preparation import PreparedSet
from evald.evals.stats.set_metrics import Earlier, StatsJob
from evald.evals.worker_pool import WorkerFailed, Workers
from evald.point import PointKey

#: a set of 20,000 questions with 16 samples each takes about ten seconds.
_TIMEOUT_S = 300.0
_ATTEMPTS = 2

#: the journals of a set that a point is compared with: of the point before it, and the baseline.
FindEarlier = Callable[[PointKey, str], list[Earlier]]


class Statistics:
    """Computes metrics of one point's sets; ``earlier`` finds what it is compared with."""

    def __init__(self, workers: Workers, key: PointKey, earlier: FindEarlier) -> None:
        self._workers = workers
        self._key = key
        self._earlier = earlier

    async def of_set(self, prepared: PreparedSet, digest: str, journal: Path) -> dict[str, float]:
        """Compute the metrics of a set whose journal is complete.

        Raises EvalSkip "crashed" when the worker fails twice; the samples stay, so that a retry of
        the point costs no generation.
        """
        eval_set, questions = prepared.loaded.eval_set, prepared.loaded.questions
        job = StatsJob(
            name=eval_set.name,
            kind=eval_set.kind,
            n_samples=eval_set.n_samples_per_eval_prompt,
            ks=list(eval_set.pass_k),
            questions=[question.id for question in questions],
            clusters=[question.cluster for question in questions],
            journal=str(journal),
            digest=digest,
            config=prepared.config_digest,
            earlier=self._earlier(self._key, eval_set.name),
        )
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                result = await self._workers.run(job, timeout_s=_TIMEOUT_S)
            except WorkerFailed as failed:
                if attempt == _ATTEMPTS:
                    raise EvalSkip(
                        f"cannot compute the statistics of eval set {eval_set.name!r}: {failed}; "
                        "its samples are kept: retry the point"
                    ) from failed
            else:
                break
        return _metrics.decode(result)


_metrics = msgspec.msgpack.Decoder(dict[str, float])
