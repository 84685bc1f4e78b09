"""Kind ``procedural``: ordinary questions, of a file that reasoning-gym has made."""

from __future__ import annotations

from evald.evals.graders import check_grader
from evald.evals.graders.contract import Rules
from evald.evals.kinds.generate import Generate
from evald.evals.procedural.made import GRADER
from evald.evals.procedural.tasks import task_fault
from evald.evals.sampling import check_stop


class Procedural(Generate):
    """Asks as ``generate`` does; ``procedural.made`` has written the rows."""

    def check(self) -> list[str]:
        """One sentence for each fault of task, grader and stop strings."""
        problems = check_stop(self._set)
        if Rules.of(self._set).inner != GRADER:
            problems += check_grader(self._set)
        if self._set.task is None:
            problems.append('task: kind "procedural" needs one; give the name of a task')
        elif fault := task_fault(self._set.task):
            problems.append(f"task: {fault}")
        return problems
