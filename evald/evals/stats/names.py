"""The names that evald gives to the numbers of an eval set, ``eval/{set}/{name}``."""

from __future__ import annotations

_OWN = frozenset(
    {
        "bits_per_byte",
        "ci95_high",
        "ci95_low",
        "curve_break",
        "mean_completed",
        "mean_scored",
        "perplexity",
        "repetition_frac",
        "response_len",
        "score_high",
        "score_low",
        "stderr",
        "stderr_within",
        "tokens",
        "weight_version",
    }
)


def is_set_metric(name: str) -> bool:
    """Tell whether ``eval/{set}/{name}`` is evald's own, so that no value may be called so.

    What stands behind a further slash (``response_len/mean``) does not count.
    """
    first = name.partition("/")[0]
    return first in _OWN or first.startswith("delta_") or first.endswith("_ratio")
