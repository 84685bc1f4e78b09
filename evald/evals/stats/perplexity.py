"""Numbers of a set whose texts are scored: ratios of sums over documents."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from evald.evals.stats.errors import ratio_error, t_interval
from evald.evals.stats.paired import Difference, t_test
from evald.evals.stats.samples import Sample


def perplexity_metrics(
    key: str, samples: Sequence[Sample], clusters: Sequence[Hashable]
) -> dict[str, float]:
    """Negative log-likelihood for each token (nats), its exponential, and bits for each byte.

    Sums over all documents, divided: a long document counts for more, as in the training loss.
    Documents that could not be scored are left out (they would make the model look better), and
    ``-none_reward_ratio`` says how many. Errors are those of a ratio, clustered by document.
    """
    if not samples:
        return {}
    nll, tokens, size = (_column(samples, name) for name in ("nll", "tokens", "bytes"))
    rate = math.fsum(nll) / math.fsum(tokens)
    bits = [value / math.log(2) for value in nll]
    metrics = {
        key: rate,
        f"{key}/perplexity": math.exp(min(rate, 700.0)),
        f"{key}/bits_per_byte": math.fsum(bits) / math.fsum(size),
        f"{key}/tokens": math.fsum(tokens),
    }
    if (n_clusters := len(set(clusters))) > 1:
        error = ratio_error(nll, tokens, clusters)
        low, high = t_interval(rate, error, n_clusters)
        metrics |= {
            f"{key}/stderr": error,
            f"{key}/ci95_low": low,
            f"{key}/ci95_high": high,
            f"{key}/bits_per_byte/stderr": ratio_error(bits, size, clusters),
        }
    return metrics


def perplexity_difference(
    pairs: Sequence[tuple[Sample, Sample]], clusters: Sequence[Hashable]
) -> Difference | None:
    """Compare new and old samples of the same documents, for each token; None without two.

    ``up`` counts documents whose likelihood for each token became worse, as the number goes up.
    """
    n_clusters = len(set(clusters))
    if n_clusters < 2:  # noqa: PLR2004 - a spread needs two
        return None
    differences = [new.values["nll"] - old.values["nll"] for new, old in pairs]
    tokens = [new.values["tokens"] for new, _ in pairs]
    delta = math.fsum(differences) / math.fsum(tokens)
    error = ratio_error(differences, tokens, clusters)
    return Difference(
        delta,
        error,
        t_test(delta, error, n_clusters),
        len(pairs),
        sum(value > 0 for value in differences),
        sum(value < 0 for value in differences),
    )


def _column(samples: Sequence[Sample], name: str) -> list[float]:
    return [sample.values[name] for sample in samples]
