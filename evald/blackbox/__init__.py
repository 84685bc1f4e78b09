"""What an evaluator class of [blackbox] sees of evald; standard library only.

An interpreter without evald's own dependencies can use it: evald hands this package to the child
process, it need not be installed there.
"""

from evald.blackbox.evaluator import CheckpointEvaluator, EvalSkip, Point, Results, SetResults

__all__ = ["CheckpointEvaluator", "EvalSkip", "Point", "Results", "SetResults"]
