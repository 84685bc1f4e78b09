"""Grading off the event loop: cheap graders here, the others in worker processes."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.evals.graders import Grade, GraderFailed, Rules, grade, reference_texts
from evald.evals.worker import GradeJob
from evald.evals.worker_pool import WorkerFailed, WorkerPool, WorkerTimedOut

#: graders without a pattern or an algebra system: microseconds for each kilobyte.
_INLINE = frozenset({"exact", "choice"})
#: a longer response goes to a worker, whatever its grader.
_INLINE_CHARS = 32_768


class Grading:
    """Grades responses; what is not cheap and linear in the response goes to ``workers``."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    async def grade(self, rules: Rules, response: str, label: Any, *, timeout_s: float) -> Grade:
        """Grade one response; ``timeout_s`` runs from when a worker takes it.

        Raises GraderFailed: the grader could not do its work, or ran out of time.
        """
        if rules.inner in _INLINE and len(response) <= _INLINE_CHARS:
            return grade(rules, response, label)
        # half a surrogate pair, in which a cut response may end, has no place in UTF-8
        text = response.encode("utf-8", "replace").decode()
        job = GradeJob(rules, text, reference_texts(label))
        try:
            result = await self._workers.run(job, timeout_s=timeout_s)
        except WorkerTimedOut as late:
            raise GraderFailed(
                f"cannot grade: {late}; raise grader_timeout_s if such answers are no accident"
            ) from late
        except WorkerFailed as failed:
            raise GraderFailed(str(failed)) from failed
        return _grades.decode(result)


_grades: msgspec.msgpack.Decoder[Grade] = msgspec.msgpack.Decoder(Grade)
