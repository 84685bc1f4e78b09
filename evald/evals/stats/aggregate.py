"""One number over several eval sets, with its error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evald.config import Aggregate
from evald.evals.stats.errors import Interval

_COMPARISONS = ("delta_prev", "delta_baseline")


def aggregate_metrics(
    aggregate: Aggregate, metrics: Mapping[str, float], questions: Mapping[str, int]
) -> dict[str, float]:
    """Compute the metrics of one aggregate from those of its sets.

    ``macro``: the mean of the sets' headlines; ``micro``: weighted by their numbers of questions,
    which is the mean over all questions, and for perplexities by their tokens, which is what one
    set of all documents would have. Sets are independent: ``sqrt(sum of (w * stderr)^2)``, and an
    interval made of the sets' own (``combined_interval``). Differences are put together in the
    same way. What a set does not have, the aggregate does not have either.
    """
    shares = _weights(aggregate, metrics, questions)
    key = f"eval/{aggregate.name}"
    headlines = _all(metrics, [f"eval/{name}" for name in aggregate.sets])
    if headlines is None:
        return {}
    mean = _weighted(shares, headlines)
    found = {key: mean}
    errors, lows, highs = (
        _all(metrics, [f"eval/{name}/{field}" for name in aggregate.sets])
        for field in ("stderr", "ci95_low", "ci95_high")
    )
    if errors is not None and lows is not None and highs is not None:
        low, high = combined_interval(shares, headlines, list(zip(lows, highs, strict=True)))
        found |= {
            f"{key}/stderr": _combined(shares, errors),
            f"{key}/ci95_low": low,
            f"{key}/ci95_high": high,
        }
    found |= _bounds(key, aggregate, metrics, shares)
    for comparison in _COMPARISONS:
        deltas = _all(metrics, [f"eval/{name}/{comparison}" for name in aggregate.sets])
        spreads = _all(metrics, [f"eval/{name}/{comparison}_stderr" for name in aggregate.sets])
        if deltas is not None and spreads is not None:
            found[f"{key}/{comparison}"] = _weighted(shares, deltas)
            found[f"{key}/{comparison}_stderr"] = _combined(shares, spreads)
    return found


def _bounds(
    key: str, aggregate: Aggregate, metrics: Mapping[str, float], shares: Sequence[float]
) -> dict[str, float]:
    """Put together the bounds of a score some of which is missing; complete sets have none."""
    if all(f"eval/{name}/score_low" not in metrics for name in aggregate.sets):
        return {}
    found = {}
    for end in ("score_low", "score_high"):
        values = [_bound(f"eval/{name}", end, metrics) for name in aggregate.sets]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[f"{key}/{end}"] = _weighted(shares, known)
    return found


def _bound(key: str, end: str, metrics: Mapping[str, float]) -> float | None:
    """One end of a set's score: the score itself when all are there, None when it has no bounds."""
    complete = not metrics.get(f"{key}-none_reward_ratio")
    return metrics[key] if complete else metrics.get(f"{key}/{end}")


def combined_interval(
    shares: Sequence[float], means: Sequence[float], intervals: Sequence[Interval]
) -> Interval:
    """Return the 95 % interval of a weighted mean of independent means from their own intervals.

    ``mean - sqrt(sum of (w * (mean_i - low_i))^2)``, and upwards likewise: the MOVER method (Zou
    and Donner, Statistics in Medicine 27 (2008) 1693-1702). It needs no normal distribution, keeps
    what is right about few questions, and of sets between 0 and 1 it stays between 0 and 1.
    """
    mean = _weighted(shares, means)
    lows, highs = [low for low, _ in intervals], [high for _, high in intervals]
    below = _combined(shares, [m - low for m, low in zip(means, lows, strict=True)])
    above = _combined(shares, [high - m for m, high in zip(means, highs, strict=True)])
    # it is inside the interval of dependent sets, but for rounding
    return max(mean - below, _weighted(shares, lows)), min(mean + above, _weighted(shares, highs))


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
