"""One number over several eval sets, with its error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evald.config import Aggregate
from evald.evals.stats.errors import Z95

_COMPARISONS = ("delta_prev", "delta_baseline")


def aggregate_metrics(
    aggregate: Aggregate, metrics: Mapping[str, float], questions: Mapping[str, int]
) -> dict[str, float]:
    """Compute the metrics of one aggregate from those of its sets.

    ``macro``: the mean of the sets' headlines; ``micro``: weighted by their numbers of questions,
    which is the mean over all questions, and for perplexities by their tokens, which is what one
    set of all documents would have. Sets are independent: ``sqrt(sum of (w * stderr)^2)``,
    with a normal interval. Differences are put together in the same way. What a set does not
    have, the aggregate does not have either.
    """
    shares = _weights(aggregate, metrics, questions)
    key = f"eval/{aggregate.name}"
    headlines = _all(metrics, [f"eval/{name}" for name in aggregate.sets])
    if headlines is None:
        return {}
    mean = _weighted(shares, headlines)
    found = {key: mean}
    errors = _all(metrics, [f"eval/{name}/stderr" for name in aggregate.sets])
    if errors is not None:
        error = _combined(shares, errors)
        found |= {
            f"{key}/stderr": error,
            f"{key}/ci95_low": mean - Z95 * error,
            f"{key}/ci95_high": mean + Z95 * error,
        }
    for comparison in _COMPARISONS:
        deltas = _all(metrics, [f"eval/{name}/{comparison}" for name in aggregate.sets])
        spreads = _all(metrics, [f"eval/{name}/{comparison}_stderr" for name in aggregate.sets])
        if deltas is not None and spreads is not None:
            found[f"{key}/{comparison}"] = _weighted(shares, deltas)
            found[f"{key}/{comparison}_stderr"] = _combined(shares, spreads)
    return found


def _weights(
    aggregate: Aggregate, metrics: Mapping[str, float], questions: Mapping[str, int]
) -> list[float]:
    sizes = [1.0] * len(aggregate.sets)
    if aggregate.how == "micro":
        tokens = _all(metrics, [f"eval/{name}/tokens" for name in aggregate.sets])
        sizes = tokens or [questions[name] for name in aggregate.sets]
    return [size / sum(sizes) for size in sizes]


def _weighted(shares: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(share * value for share, value in zip(shares, values, strict=True))


def _combined(shares: Sequence[float], errors: Sequence[float]) -> float:
    return math.hypot(*(share * error for share, error in zip(shares, errors, strict=True)))


def _all(metrics: Mapping[str, float], names: Sequence[str]) -> list[float] | None:
    if any(name not in metrics for name in names):
        return None
    return [metrics[name] for name in names]
