"""How far a difference is beyond noise, in half widths of its 95 % interval.

One scale for all: a paired p-value where the record has one (McNemar's exact test, or Student's t),
else the interval that two independent values' own intervals make (MOVER: Zou and Donner, Statistics
in Medicine 27 (2008) 1693-1702), which is right about shares near 0 and 1, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import msgspec

from evald.evals.stats.errors import Z95

_NORMAL = statistics.NormalDist()


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A metric at one point; ``low`` and ``high``: its 95 % interval, None where none is known."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None
    #: every sample counts: it may be the best one.
    complete: bool = True
    #: number of its point, in the order in which points have ended.
    ended: int = 0


def widths(p_one_sided: float) -> float:
    """Return how many half widths away has this chance; 0 for one half and more."""
    if p_one_sided >= 0.5:  # noqa: PLR2004 - the middle
        return 0.0
    return math.inf if p_one_sided <= 0 else -_NORMAL.inv_cdf(p_one_sided) / Z95


def chance(k: float) -> float:
    """Return how often noise alone goes ``k`` half widths in one direction."""
    return _NORMAL.cdf(-k * Z95)


def widened(k: float, candidates: int) -> float:
    """Return the k for the best of so many values: one of them had luck (Bonferroni).

    With it the chance that noise exceeds it against any of them is at most that of ``k`` against
    one.
    """
    return widths(chance(k) / max(candidates, 1))


def paired(metrics: Mapping[str, float], key: str, *, sign: int) -> tuple[float, float] | None:
    """Return by how much the point is worse on the same questions, and in half widths.

    ``key``: such as "eval/aime/delta_prev"; ``sign``: -1 where less is worse. None: the record has
    no such difference.
    """
    delta = metrics.get(key)
    if delta is None:
        return None
    worse_by = sign * delta
    p, error = metrics.get(f"{key}_p"), metrics.get(f"{key}_stderr", 0.0)
    if worse_by <= 0:
        return worse_by, 0.0
    if p is None and error > 0:
        return worse_by, worse_by / error / Z95
    if p is None:
        # all questions changed by the same: as many coins fell on one side
        n_worse = metrics.get(f"{key}_{'up' if sign > 0 else 'down'}", 0.0)
        p = 2 * 0.5**n_worse
    return worse_by, widths(p / 2)


def independent(new: Reading, old: Reading, *, sign: int) -> tuple[float, float | None]:
    """Return the same for two values that know nothing of each other; None: errors unknown."""
    worse_by = sign * (new.value - old.value)
    if new.low is None or new.high is None or old.low is None or old.high is None:
        return worse_by, None
    if sign < 0:
        margin = math.hypot(new.high - new.value, old.value - old.low)
    else:
        margin = math.hypot(new.value - new.low, old.high - old.value)
    if worse_by <= 0:
        return worse_by, 0.0
    return worse_by, worse_by / margin if margin > 0 else math.inf
