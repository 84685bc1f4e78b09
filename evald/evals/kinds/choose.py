"""Which class asks the questions of an eval set."""

from __future__ import annotations

from collections.abc import Callable

from evald.config import EvalSet
from evald.evals.kinds.choice import LoglikelihoodChoice
from evald.evals.kinds.contract import Kind
from evald.evals.kinds.custom import Custom
from evald.evals.kinds.generate import Generate
from evald.evals.kinds.perplexity import Perplexity
from evald.evals.kinds.procedural import Procedural

_KINDS: dict[str, Callable[[EvalSet], Kind]] = {
    "generate": Generate,
    "loglikelihood_choice": LoglikelihoodChoice,
    "perplexity": Perplexity,
    "custom": Custom,
    "procedural": Procedural,
}


def kind_of(eval_set: EvalSet) -> Kind:
    """Return the kind that the config names."""
    return _KINDS[eval_set.kind](eval_set)
