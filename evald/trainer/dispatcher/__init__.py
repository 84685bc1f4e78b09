"""When a step gets its point, and what becomes of it; needs no torch."""

from evald.trainer.dispatcher.dispatcher import EvalDispatcher
from evald.trainer.dispatcher.outcomes import Dispatched, Drained

__all__ = ["Dispatched", "Drained", "EvalDispatcher"]
